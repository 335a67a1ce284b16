"""The arithmetic of the benchmarks of masks and of joint reuse."""

from __future__ import annotations

import pytest
import torch
from attention_maps import exact_map, local_attention

from benchmarks import joint, joint_model, mask_sources, masks
from carnator.connectivity import layout
from carnator.demo.wan import rotary_table, rotate

GRID = (2, 8, 16)


def test_the_bias_of_the_wide_model_is_a_bump_around_every_place():
    heads, dim = 3, 128
    bias = joint_model.place_bias(heads, dim).view(1, 1, heads, dim)
    turned = rotate(bias.expand(1, 8 * 32 * 32, heads, dim), rotary_table((8, 32, 32), dim))
    q = turned[0].transpose(0, 1)
    own = (3 * 32 + 16) * 32 + 16
    scores = (q[:, own : own + 1] * q).sum(-1).view(heads, 8, 32, 32) / dim**0.5
    torch.testing.assert_close(
        scores[:, 3, 16, 16], torch.full((heads,), sum(joint_model.HEIGHT)), rtol=1e-3, atol=0
    )
    assert bool((scores[:, 3, 16, 16, None, None, None] >= scores - 1e-3).all())
    width = (scores[:, 3, 16] > sum(joint_model.HEIGHT) - 4).sum(-1)
    assert width[0] < width[2] < 12, "heads differ in how far they reach"


def test_all_sources_keep_the_same_number_of_blocks_and_what_the_layout_asks():
    at = layout((4, 8, 8))
    for density in (0.25, 0.5):
        counts = set()
        for seed in range(3):
            scores = torch.rand(2, 32, 32, generator=torch.Generator().manual_seed(seed))
            mask = mask_sources.kept(scores, at, density)
            assert bool((mask | ~at.always).all())
            counts.add(int(mask.sum()))
        assert len(counts) == 1
        assert counts.pop() / (2 * 32 * 32) == pytest.approx(density, abs=0.05)


def test_exact_mass_is_that_of_the_definition_and_masks_reach_their_tokens():
    at = layout((2, 5, 7), before=3)
    q, k = local_attention(at)
    torch.testing.assert_close(mask_sources.exact_mass(q, k, at, 0.25), exact_map(q, k, at))
    mask = torch.rand(2, at.blocks, at.blocks) < 0.5
    over = mask_sources.over_tokens(mask, at)
    for i, j in ((0, 0), (10, 40), (72, 1)):
        a, b = ((at.order == token).nonzero().item() // at.block for token in (i, j))
        assert torch.equal(over[:, i, j], mask[:, a, b])


def test_gaps_between_donor_and_template_are_paired():
    rows = [
        {"source": s, "density": 0.5, "recall": r, "error": 0.1, "clip_db": 20.0 + r}
        for a, b in ((0.9, 0.8), (0.6, 0.7), (0.8, 0.5))
        for s, r in (("donor", a), ("template", b))
    ]
    found = masks.summary(rows, [])["0.5"]
    assert found["donor_over_template_recall"]["mean"] == pytest.approx(0.1)
    assert found["donor_over_template_recall"]["standard_error"] == pytest.approx(0.1155, abs=1e-3)
    assert found["donor"]["recall"] == pytest.approx(0.7667, abs=1e-4)


def test_the_product_of_the_parts():
    seconds = {"dense": 30.0, "sparse_only": 24.0, "trajectory_only": 6.0, "both": 5.0}
    found = joint.summary({"seconds": seconds, "composed": True})
    assert found["speedup"] == 6.0 and found["joint_over_product"] == pytest.approx(0.96)
    assert (found["sparse_only"], found["trajectory_only"]) == (1.25, 5.0)


def test_times_are_composed_of_evaluations_of_the_engines_own_runs(monkeypatch):
    monkeypatch.setattr(joint, "predicted_seconds", lambda shape: 0.0)
    model = joint_model.built(dim=128, heads=1, ffn=64)
    found = joint.composed(model, joint_model.latent_shape(GRID), "gather")
    assert found["least_recall"] >= 0.95 and found["layers_sparse"] == 1
    assert 0 < found["denoised_error"] < 0.1
    each, total = found["evaluation_seconds"], found["seconds"]
    assert total["dense"] == pytest.approx(30 * each["dense"], abs=0.01)
    assert total["sparse_only"] == pytest.approx(2 * each["dense"] + 28 * each["sparse"], abs=0.01)
    later = joint.EVALUATIONS - 2
    assert total["both"] == pytest.approx(2 * each["dense"] + later * each["sparse"], abs=0.01)


def test_whole_runs_hit_and_are_compared(monkeypatch):
    monkeypatch.setattr(joint, "STEPS", 16)
    model = joint_model.built(dim=128, heads=1, ffn=64)
    found = joint.whole(model, joint_model.latent_shape(GRID), "gather")
    made = joint.EVALUATIONS
    expected = {"dense": 16, "trajectory_only": made, "both": made, "sparse_only": 16}
    assert found["evaluations"] == expected
    assert found["psnr_db"]["both"] > found["psnr_db"]["trajectory_only"] - 1
    assert found["layers_sparse"] == 1 and joint.summary(found)["composed"] is False
