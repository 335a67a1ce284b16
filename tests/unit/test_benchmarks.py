"""The benchmarks' own arithmetic, and that their batched runs are the runs a user gets."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks import batch, calibrate, fidelity, overhead
from carnator.demo import captions, host
from carnator.demo.model import EmbeddedModel
from carnator.demo.wan import WanConfig, WanTransformer
from carnator.derivative import denoised_from, derivative
from carnator.predict import Predictor, schedule_position


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = WanConfig(dim=24, ffn_dim=32, num_heads=2, num_layers=1)
    return EmbeddedModel(WanTransformer(config), "tiny")


def test_pairs_change_what_their_kind_says_and_are_held_out():
    pairs = batch.held_out_pairs(1, ("color", "unrelated"), 5)
    assert [p.kind for p in pairs] == ["color"] * 5 + ["unrelated"] * 5
    assert all(p.target.held_out for p in pairs)
    assert pairs == batch.held_out_pairs(1, ("color", "unrelated"), 5)
    assert pairs != batch.held_out_pairs(2, ("color", "unrelated"), 5)


def test_calibration_keeps_clear_of_the_targets_it_is_tested_on():
    tested = {str(p.target) for p in batch.held_out_pairs(fidelity.PAIR_SEED, ("shape",), 3)}
    assert tested
    excluded = frozenset(tested)
    rng = random.Random(0)
    for _ in range(20):
        donor, target = calibrate.draw(rng, "shape", excluded)
        assert str(target) not in tested and donor != target
    donor, target = calibrate.draw(rng, "lora", excluded)
    assert donor == target


@pytest.mark.parametrize("sampler", sorted(host.SAMPLERS))
def test_a_batched_dense_run_is_the_run_a_user_gets(model, sampler):
    what = [captions.parse("red circle left on gray"), captions.parse("blue square up on white")]
    made = batch.Batch.of(model, what, [3, 4], [2.5, 4.0], 6, sampler)
    latents, donors = made.dense(record=True)
    assert len(donors) == 2 and made.total == host.evaluation_count(sampler, 6)
    for i, (caption, seed, cfg) in enumerate(zip(what, (3, 4), (2.5, 4.0), strict=True)):
        one = host.generate(model, caption, seed=seed, cfg=cfg, steps=6, sampler=sampler)
        torch.testing.assert_close(latents[i : i + 1], one.latent, atol=1e-4, rtol=1e-4)


def test_a_batched_plan_predicts_as_a_single_run_does(model):
    source, target = (
        captions.parse("red circle left on gray"),
        captions.parse("cyan square up on gray"),
    )
    donors = batch.Batch.of(model, [source] * 2, [3, 4], [2.5, 2.5], 8).dense(record=True)[1]
    made = batch.Batch.of(model, [target] * 2, [3, 4], [2.5, 2.5], 8)
    plan = made.plan(4)
    latents, spent = made.planned(plan, donors)
    assert bool((spent > 0).all())
    cond, uncond = captions.embed(target)[None], captions.embed(None)[None]
    sigmas = host.simple_sigmas(8)
    predictor = Predictor(lambda s: donors[0].at(s, 2.5), schedule_position(sigmas.tolist()))
    calls = []

    def denoise(x, sigma):
        calls.append(sigma)
        if len(calls) - 1 not in plan.evaluated:
            return denoised_from(x, predictor.predict(sigma), sigma)
        with torch.no_grad():
            positive, negative = model.branches(x, sigma, cond, uncond)
        guided = negative + (positive - negative) * 2.5
        predictor.add(sigma, derivative(x, guided, sigma))
        return guided

    single = host.euler(denoise, host.seed_noise(3), sigmas)
    torch.testing.assert_close(latents[:1], single, atol=1e-4, rtol=1e-4)
    dense, _ = made.dense()
    assert not torch.allclose(latents, dense, atol=1e-5)
    everything, spent = made.planned(made.plan(8), donors)
    torch.testing.assert_close(everything, dense, atol=1e-5, rtol=1e-5)
    assert not spent.any()


def test_the_donor_is_worth_more_the_nearer_it_is(model):
    caption = captions.parse("red circle left on gray")
    made = batch.Batch.of(model, [caption], [3], [2.5], 8)
    twin = made.dense(record=True)[1]
    other = batch.Batch.of(model, [captions.parse("cyan square up on white")], [3], [2.5], 8)
    stranger = other.dense(record=True)[1]
    assert made.d1(twin)[0] < 1e-3 < made.d1(stranger)[0]
    dense, _ = made.dense()
    near, far, own = (
        batch.psnr_each(made.planned(made.plan(4), d)[0], dense)[0] for d in (twin, stranger, None)
    )
    assert near > far > own


@pytest.mark.parametrize(
    ("psnr", "evaluations"),
    [(20, 5), (10, 5), (25, 7.5), (30, 10), (29, 9.5), (35, 17.5), (41, 30)],
)
def test_needed_evaluations_are_interpolated_on_the_best_so_far(psnr, evaluations):
    curve = {20: 40.0, 10: 30.0, 5: 20.0, 12: 28.0, 15: 30.0}
    assert fidelity.needed(curve, psnr, 30) == pytest.approx(evaluations)


def test_overhead_is_the_median_of_paired_differences():
    plain = [(1.0, 0.1), (1.0, 0.1), (3.0, 0.1)]
    case = overhead.figures("x", plain, [(1.01, 0.102), (1.03, 0.101), (3.02, 0.104)])
    assert case["overhead_ms"] == 20.0 and case["overhead_percent"] == 2.0
    assert case["outside_ms"] == 2.0 and case["outside_error_ms"] == 1.07
    assert case["allowed_ms"] == 22.0
