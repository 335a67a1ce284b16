"""The ablation benchmark: its variants, shortlists and figures, and one run of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks import ablation, bars, batch, command, donors, variants
from carnator.demo import host
from carnator.demo.model import EmbeddedModel
from carnator.demo.wan import WanConfig, WanTransformer
from carnator.predict import Predictor, schedule_position
from carnator.request import Settings
from carnator.signature import LAYOUT_GRID, pooled
from carnator.store import Store

LEVELS = [1.0, 0.9, 0.7, 0.4, 0.2, 0.0]
SHAPE = (2, 3, 3, 4, 4)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = WanConfig(dim=24, ffn_dim=32, num_heads=2, num_layers=1)
    return EmbeddedModel(WanTransformer(config), "tiny")


@pytest.fixture(scope="module")
def shelf(model):
    pairs = donors.targets(2)
    return donors.Shelf(model, pairs, 5, pairs[0].seed)


# Targets and donors.


def test_targets_are_held_out_and_every_kind_has_its_turn():
    found = donors.targets(12)
    assert [p.kind for p in found[:5]] == list(batch.WORD_KINDS) == [p.kind for p in found[5:10]]
    assert all(p.target.held_out for p in found) and len(set(found)) == 12
    with pytest.raises(ValueError, match="use 1 to 120"):
        donors.targets(121)


def test_a_shelf_judges_as_carnator_does(shelf):
    assert [shelf.donors[i] for i in shelf.own] == [p.donor for p in shelf.pairs]
    assert not {p.target for p in shelf.pairs} & set(shelf.donors)
    for place in range(len(shelf.donors)):
        known = [shelf.records[place]] * 2
        assert shelf.d1[:, place].tolist() == pytest.approx(shelf.targets.d1(known), rel=1e-4)
    assert shelf.d0.shape == shelf.d1.shape == shelf.likeness.shape == (2, 5)
    assert not np.allclose(shelf.d0, shelf.d1)
    with pytest.raises(ValueError, match="too few for 2 targets"):
        donors.captions_for(shelf.pairs, 1, 0)
    pair = shelf.pairs[0]
    turned = batch.Pair("shape", pair.target, pair.donor, 0)
    with pytest.raises(ValueError, match="its own donor"):
        donors.captions_for([pair, turned], 5, 0)


def test_exact_derivatives_are_those_of_the_record_before_its_coding(shelf):
    for level in (0.99, 0.5):
        coded, exact = shelf.records[0].at(level, host.CFG), shelf.exact[0].at(level, host.CFG)
        assert 0 < float((coded - exact).square().mean() / exact.square().mean()) < 1e-3
        coded, exact = (r[0].at(level, 6.0) for r in (shelf.records, shelf.exact))
        assert 0 < float((coded - exact).square().mean() / exact.square().mean()) < 1e-2
    run = donors.Line([1.0, 0.5, 0.1], [torch.full((1,), v) for v in (1.0, 3.0, 7.0)])
    assert [float(run.at(s)) for s in (1.0, 0.75, 0.5, 0.3, 0.1, 0.0)] == [1, 2, 3, 5, 7, 7]
    both = donors.Exact(run, run, 4.0)
    assert [float(both.at(0.5, cfg)) for cfg in (4.0, 6.0)] == [3, 9]


def test_signatures_are_the_ones_runs_are_stored_under(model, shelf, tmp_path):
    with Store(tmp_path) as store:
        settings = Settings()
        host.generate(model, shelf.donors[1], seed=shelf.seed, settings=settings, store=store)
        store.flush()
        (entry,) = store.entries()
    assert np.allclose(shelf.signatures[1][1], entry.signature, atol=2e-3)
    parts = donors.signature_parts(shelf.targets.noise.shape, len(entry.signature))
    assert [p.start for p in parts.values()][1:] == [p.stop for p in parts.values()][:-1]
    assert parts["attention"].stop == len(entry.signature)
    assert parts["attention"].stop - parts["attention"].start == 48
    x = torch.randn(model.family.shape)
    assert parts["layout"] == slice(0, len(pooled(x, LAYOUT_GRID)))


def test_carnators_choice_is_the_nearest_of_its_shortlist(shelf):
    assert shelf.chosen([[0, 1], [2, 3]]).tolist() == [
        int(shelf.d1[0, :2].argmin()),
        2 + int(shelf.d1[1, 2:4].argmin()),
    ]
    assert all(len(set(some)) == 4 for some in shelf.shortlists())
    for name, choice in donors.CHOICES.items():
        assert choice(shelf).shape == (2,), name
    assert donors.CHOICES["best by D0"](shelf).tolist() == shelf.d0.argmin(1).tolist()


# Variants.


def nodes(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return {s: torch.randn(SHAPE, generator=generator) for s in LEVELS[:-1]}


def shown(predictor, levels=(1.0, 0.7)):
    target = nodes(1)
    for level in levels:
        predictor.add(level, target[level])
    return predictor


POSITION = schedule_position(LEVELS)


def test_several_donors_are_weighed_as_one_is():
    donor = nodes(2).__getitem__
    one, same = shown(Predictor(donor, POSITION)), shown(variants.Several([donor], POSITION))
    torch.testing.assert_close(one.predict(0.4), same.predict(0.4))
    one, same = (
        shown(p, (1.0,)) for p in (Predictor(donor, POSITION), variants.Several([donor], POSITION))
    )
    torch.testing.assert_close(one.predict(0.9), same.predict(0.9))


def test_the_better_of_several_donors_counts_more():
    near = {s: d + 0.01 * nodes(3)[s] for s, d in nodes(1).items()}
    made = shown(variants.Several([nodes(2).__getitem__, near.__getitem__], POSITION))
    torch.testing.assert_close(made.weights.sum(0), torch.ones_like(made.weights[0]))
    assert float(made.weights[2].min()) > 0.99
    with pytest.raises(ValueError, match="before the first"):
        variants.Several([near.__getitem__], POSITION).predict(0.5)


def test_a_variant_changes_what_its_name_says():
    donor, target = nodes(2), nodes(1)
    plain = shown(Predictor(donor.__getitem__, POSITION))
    made = {
        kind: shown(kind(donor.__getitem__, POSITION))
        for kind in (
            variants.EvenMix,
            variants.ClipMix,
            variants.HeldOwn,
            variants.HeldDifference,
        )
    }
    assert bool((made[variants.EvenMix].weight == 0.5).all())
    clip = made[variants.ClipMix].weight
    assert torch.equal(clip, clip[:, :, :1, :1, :1].expand_as(clip)) and clip[0, 0, 0, 0, 0] != 0.5
    assert plain.weight.std() > 0
    own, led = target[0.7], target[0.7] - donor[0.7] + donor[0.4]
    torch.testing.assert_close(made[variants.HeldOwn]._own(0.4), own)
    torch.testing.assert_close(made[variants.HeldOwn]._led(0.4), plain._led(0.4))
    torch.testing.assert_close(made[variants.HeldDifference]._led(0.4), led)
    torch.testing.assert_close(made[variants.HeldDifference]._own(0.4), plain._own(0.4))
    assert not torch.allclose(plain._led(0.4), led)


def test_the_shipped_form_is_the_one_that_is_calibrated(shelf):
    chosen = shelf.chosen()
    records = [shelf.records[i] for i in chosen]
    wanted, _ = shelf.targets.planned(shelf.targets.probed_plan(8), records)
    heads = ablation.heads()
    for part, variant in heads.items():
        if part != variants.GUIDANCE:
            assert torch.equal(variant.run(shelf, 8, chosen), wanted), part
    apart = heads[variants.GUIDANCE].run(shelf, 8, chosen)
    scaled, _ = shelf.scaled
    own = [shelf.records[i] for i in shelf.own]
    assert torch.equal(apart, scaled.planned(scaled.probed_plan(8), own)[0])
    for variant in variants.VARIANTS:
        if variant not in heads.values() and variant.part not in ("donor", variants.GUIDANCE):
            assert not torch.equal(variant.run(shelf, 8, chosen), wanted), variant.name


# Figures.


def test_paired_differences_by_hand():
    found = ablation.stats(np.array([30.0, 34.0, 32.0]), np.array([29.0, 31.0, 30.0]))
    assert found["mean_db"] == 32.0 and found["p10_db"] == 30.4
    assert found["delta_db"] == 2.0 and found["delta_error_db"] == pytest.approx(3**-0.5, abs=1e-3)


def test_ranks_share_ties():
    assert ablation.ranks(np.array([5.0, 1.0, 5.0, 9.0])).tolist() == [1.5, 0, 1.5, 3]
    rising = np.array([1.0, 2.0, 3.0])
    assert ablation.spearman(rising, rising**3) == 1.0
    assert ablation.spearman(rising, -rising) == -1.0
    assert ablation.spearman(rising, np.array([1.0, 3.0, 2.0])) == 0.5
    assert ablation.spearman(rising, np.ones(3)) is None


def test_decisions_are_compared_at_equal_acceptance():
    db = np.array([20.0, 25.0, 33.0, 40.0])
    found = ablation.decision(np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1]), db)
    assert found["fine"] == 0.5
    assert (found["D0"]["spearman"], found["D1"]["spearman"]) == (-1.0, 1.0)
    assert found["D0"]["accepted_below_floor"] == {"0.25": 1.0, "0.5": 1.0, "0.75": 0.6667}
    assert found["D1"]["accepted_below_floor"] == {"0.25": 0.0, "0.5": 0.0, "0.75": 0.3333}
    assert found["the PSNR itself"]["spearman"] == 1.0


def test_the_benchmark_runs_from_targets_to_files(model, tmp_path):
    summary = ablation.run(model, shelves=1, on_shelf=2, size=5).summary()
    assert summary["targets"] == 2 and len(summary["rows"]) == len(variants.VARIANTS)
    for row in summary["rows"]:
        if row["part"] in (r["part"] for r in summary["rows"][: summary["rows"].index(row)]):
            continue
        assert row["10"]["delta_db"] == 0.0  # the shipped form
    recall = {row["shortlist"]: row for row in summary["signature"]}
    assert {"whole signature", "without attention", "layout alone", "by D0"} <= set(recall)
    assert all(0 <= r["recall"] <= 1 and r["excess"] >= 0 for r in recall.values())
    assert summary["decision"]["runs"] >= 4
    path = tmp_path / "out.json"
    command.save(path, {"summary": {"wan": summary}})
    assert json.loads(path.read_text())["summary"]["wan"] == summary
    assert "donors: three by D1" in ablation.text("wan", summary)
    pytest.importorskip("matplotlib")
    bars.ablation_plot({"wan": summary}, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000
