"""The algebra of the method: derivatives, encoding, interpolation, prediction, plans, risk."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gaussian import SHAPE, denoised, noise, prompt_mean, schedule
from hypothesis import given
from hypothesis import strategies as st

from carnator.backbones import architecture
from carnator.coding import Encoder, decode, encode_whole
from carnator.derivative import Branches, denoised_from, derivative, relative_deviation
from carnator.noise import BANK_SIZE, bank_index, bank_seed
from carnator.plan import probed, spaced
from carnator.predict import Predictor, mix_weight, schedule_position, token_error
from carnator.ranking import Ranking, smallest
from carnator.recording import needed
from carnator.risk import PRESETS, Guard, RiskTable, Row, table_for, to_db
from carnator.samplers import contract, schedule_fault
from carnator.signature import AttentionProbe, signature
from carnator.trajectory import Path, Trajectory


def test_derivative_inverts_and_is_the_flow_velocity():
    clean, eps, sigma = prompt_mean(1), noise(), 0.7
    x = (1 - sigma) * clean + sigma * eps
    d = derivative(x, clean, sigma)
    assert torch.allclose(d, eps - clean, atol=1e-5)
    assert torch.allclose(denoised_from(x, d, sigma), clean, atol=1e-5)


def test_relative_deviation_is_infinite_where_it_means_nothing():
    one = torch.ones(1, 2, 2, 2, 2)
    assert relative_deviation(one, one) == 0
    assert relative_deviation(one * 2, one) == pytest.approx(1)
    assert relative_deviation(one, one * 0) == math.inf
    assert relative_deviation(one * math.nan, one) == math.inf


def test_branches_recombine_at_any_guidance():
    c, u = prompt_mean(1), prompt_mean(2)
    assert torch.allclose(Branches(c, u).at(4.0), u + 4 * (c - u), atol=1e-5)
    assert torch.equal(Branches(c, u).at(1.0), c) and torch.equal(Branches(c).at(4.0), c)


@given(st.floats(1e-6, 1e4, allow_subnormal=False), st.integers(0, 50))
def test_encoding_keeps_one_part_in_a_hundred(scale, seed):
    d = prompt_mean(seed) * scale
    error = (decode(encode_whole(d), d.shape) - d).square().mean().sqrt()
    assert float(error) < 0.012 * d.square().mean().sqrt()


def encoded(sigmas, first, *others) -> Path:
    encoder = Encoder(first)
    for d in others:
        encoder.add(d)
    return Path(sigmas, first, encoder.encoded)


def trajectory(cfg: float = 1.0, sigmas=None):
    sigmas = sigmas or schedule()[:-1]
    path = lambda s: derivative(noise() * s, denoised(noise() * s, s, prompt_mean(1)), s)  # noqa: E731
    return Trajectory(encoded(sigmas, *map(path, sigmas)), cfg), path


def test_trajectory_answers_between_its_nodes_and_refuses_above_them():
    donor, path = trajectory(sigmas=[0.9, 0.6, 0.3])
    middle = (path(0.9) + path(0.6)) / 2
    assert torch.allclose(donor.at(0.75, 1.0), middle, atol=0.05)
    assert torch.allclose(donor.at(0.1, 1.0), path(0.3), atol=0.05)
    with pytest.raises(ValueError, match="starts at sigma"):
        donor.at(0.95, 1.0)


def test_both_branches_come_back_for_any_guidance():
    c, u = prompt_mean(1), prompt_mean(2)
    guided, guidance = encoded([0.9, 0.5], *[u + 2 * (c - u)] * 2), encoded([0.9], c - u)
    donor = Trajectory(guided, 2.0, guidance)
    assert torch.allclose(donor.at(0.7, 2.0), u + 2 * (c - u), atol=0.03)
    assert torch.allclose(donor.at(0.7, 4.0), u + 4 * (c - u), atol=0.15)
    assert torch.allclose(donor.at(0.7, 1.0), c, atol=0.03)


def test_of_two_evaluations_at_one_sigma_the_later_counts():
    a, b = prompt_mean(1), prompt_mean(2)
    donor = Trajectory(encoded([1.0, 0.5, 0.5], a, a, b))
    assert torch.allclose(donor.at(0.5, 1.0), b, atol=0.05)


def test_needed_reads_only_the_targets_part():
    assert needed([1.0, 0.8, 0.6, 0.4, 0.2], [0.65, 0.5]) == 4
    assert needed([1.0, 0.5], [0.7]) == needed([1.0, 0.5], [0.1]) == 2


EVEN = schedule_position([1.0, 0.5, 0.0])  # equally spaced: position is linear in sigma


def test_position_counts_the_steps_of_the_schedule():
    position = schedule_position([1.0, 0.9, 0.5, 0.0])
    assert [position(s) for s in (1.0, 0.9, 0.7, 0.0)] == [0.0, 1.0, 1.5, 3.0]


def test_predictor_is_exact_for_a_donor_and_a_difference_linear_in_position():
    curve = lambda s: prompt_mean(1) * math.sin(5 * s)  # noqa: E731
    target = lambda s: curve(s) + prompt_mean(2) * (1 + 2 * s)  # noqa: E731
    predictor = Predictor(curve, EVEN)
    predictor.add(1.0, target(1.0))
    for s in (0.8, 0.7):
        predictor.add(s, target(s))
    error = predictor.add(0.6, target(0.6))
    assert error is not None and float(error.max()) < 1e-8
    assert torch.allclose(predictor.predict(0.5), target(0.5), atol=1e-4)
    alone = Predictor(None, EVEN)
    for s in (0.8, 0.6):
        alone.add(s, target(s))
    assert not torch.allclose(alone.predict(0.5), target(0.5), atol=1e-2)


def test_scope_gives_each_token_its_better_predictor():
    """Left half follows a curved donor, right half goes straight and against it."""
    left = torch.zeros(SHAPE)
    left[..., :3] = 1
    curve = lambda s: prompt_mean(1) * math.sin(6 * s)  # noqa: E731
    target = lambda s: left * curve(s) + (1 - left) * prompt_mean(2) * s  # noqa: E731
    predictor = Predictor(curve, EVEN)
    for s in (1.0, 0.85, 0.7):
        predictor.add(s, target(s))
    weight = predictor.weight[0, 0]
    assert weight[..., 0].min() > 0.9 and weight[..., -1].max() < 0.1
    error = (predictor.predict(0.6) - target(0.6)).square().mean()
    led = Predictor(curve, EVEN, mix=False)
    for s in (1.0, 0.85, 0.7):
        led.add(s, target(s))
    assert error < 0.5 * (led.predict(0.6) - target(0.6)).square().mean()


def test_predictor_survives_two_evaluations_at_one_sigma():
    predictor = Predictor(lambda s: prompt_mean(1) * s, EVEN)
    for s in (1.0, 0.8, 0.8):
        predictor.add(s, prompt_mean(2) * s)
    assert torch.isfinite(predictor.predict(0.7)).all()


def test_token_error_and_weights():
    a = torch.zeros(1, 2, 3, 4, 4)
    assert token_error(a, a + 1).shape == (1, 1, 3, 4, 4)
    assert torch.allclose(token_error(a, a + 1), torch.ones(1, 1, 3, 4, 4))
    assert token_error(a[:, :, 0], a[:, :, 0] + 2).shape == (1, 1, 4, 4)
    assert token_error(a[:, :, :1], a[:, :, :1] + 1).shape == (1, 1, 1, 4, 4), "one frame"
    assert float(mix_weight(torch.tensor(1.0), torch.tensor(0.0))) == 1
    assert float(mix_weight(torch.tensor(0.0), torch.tensor(0.0))) == 0


@given(st.integers(5, 100), st.floats(0, 1, allow_subnormal=False), st.floats(1, 12), st.data())
def test_plans_evaluate_first_and_last_and_exactly_as_many(total, late, shift, data):
    n = data.draw(st.integers(2, total))
    plan = spaced(schedule(total, shift)[:-1], n, late)
    assert len(plan) == n and {0, total - 1} <= plan.evaluated
    after = data.draw(st.sampled_from(sorted(plan.evaluated)))
    tight = plan.tightened(after).evaluated
    assert {m for m in plan.evaluated if m <= after} == {m for m in tight if m <= after}
    ahead = sum(m > after for m in plan.evaluated)
    assert sum(m > after for m in tight) == 2 * ahead - plan_ones(plan, after)
    assert total - 1 in tight


def plan_ones(plan, after):
    """Gaps beyond a call that nothing fits in."""
    marks = [m for m in sorted(plan.evaluated) if m >= after]
    return sum(b - a == 1 for a, b in zip(marks, marks[1:], strict=False))


def test_tightened_gaps_still_only_shorten():
    plan = spaced(schedule(30)[1:-1], 9)  # gaps 3 4 4 4 4 4 3 2
    assert gaps_of(plan.tightened(7)) == [3, 4, *[2] * 9, *[1] * 3]
    assert plan.tightened(28) == plan


def test_plans_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="does not fit"):
        spaced(schedule(10)[:-1], 11)
    with pytest.raises(ValueError, match="nothing to plan"):
        spaced([0.5] * 10, 4)


def gaps_of(plan):
    return np.diff(sorted(plan.evaluated)).tolist()


@given(st.integers(5, 100), st.floats(1.5, 12), st.data())
def test_gaps_only_shorten_after_the_first(total, shift, data):
    calls = schedule(total, shift)[:-1]
    rest = gaps_of(spaced(calls, data.draw(st.integers(3, total))))[1:]
    assert rest == sorted(rest, reverse=True)


def test_late_plans_follow_sigma():
    calls = schedule(30)[:-1]
    assert gaps_of(spaced(calls, 4, late=0)) == [9, 10, 10]
    assert gaps_of(spaced(calls[1:], 9)) == [3, 4, 4, 4, 4, 4, 3, 2]
    rising = (np.linspace(1, 0.1, 30) ** 2).tolist()  # long strides at the start
    assert gaps_of(spaced(rising, 5, late=1))[1:] == sorted(gaps_of(spaced(rising, 5, late=1))[1:])
    late = sorted(spaced(calls, 6, late=1).evaluated)
    strides = [calls[a] - calls[b] for a, b in zip(late, late[1:], strict=False)]
    assert max(strides) < 1.6 * sum(strides) / len(strides)
    two_each = [s for s in calls for _ in range(2)]
    assert len(spaced(two_each, 7)) == 7


def table(**changes):
    rows = tuple(
        Row(n, 0.5, ((-4.0, db + 32, db + 31, db + 31.5), (0.0, db, db - 1, db - 0.5)))
        for n, db in ((6, 24), (10, 30), (15, 34))
    )
    values = dict(
        name="t", architecture="t", peak=2.0, guard=1.0, ceiling=1.0, kinds={"single": rows}
    )
    return RiskTable(**{**values, **changes})


def test_acceptance_is_monotone_in_d1_and_budget():
    chosen = []
    for d1 in (0.001, 0.01, 0.05, 0.1, 0.3, 0.9):
        row = table().choose("single", 30, d1, 31.0)
        chosen.append(row.evaluations if row else 99)
    assert chosen == sorted(chosen) and chosen[0] == 6 and chosen[-1] > 6
    strict = table().choose("single", 30, 0.01, 45.0)
    loose = table().choose("single", 30, 0.01, 27.0)
    assert loose is not None and (strict is None or strict.evaluations > loose.evaluations)
    nearly, most = (table().choose("single", 30, 0.06, 33.0, loose) for loose in (False, True))
    assert nearly is not None and most is not None and most.evaluations < nearly.evaluations


def test_a_probed_plan_evaluates_the_first_two_calls():
    calls = schedule(30)[:-1]
    plan = sorted(probed(calls, 8).evaluated)
    assert plan[:2] == [0, 1] and plan[-1] == 29 and len(plan) == 8 and plan[2] > 3
    with pytest.raises(ValueError, match="does not fit"):
        probed(calls, 2)


def test_acceptance_refuses_beyond_what_was_measured():
    assert table().choose("single", 30, 1.1, 10.0) is None
    assert table().choose("no such kind", 30, 0.01, 10.0) is None
    assert table().choose("single", 7, 0.01, 10.0) is None, "6 of 7 would save nothing"
    assert table().choose("single", 30, math.inf, 10.0) is None


def test_shipped_tables_are_monotone():
    shipped = table_for("unknown architecture")
    assert not shipped.calibrated and shipped.extra > 0
    for rows in shipped.kinds.values():
        for row in rows:
            for column in (1, 2, 3):  # mean, strict, loose
                levels = [k[column] for k in row.knots]
                assert levels == sorted(levels, reverse=True)
            assert all(strict <= loose for _, _, strict, loose in row.knots)
        assert len({(row.evaluations, row.late) for row in rows}) == len(rows)
    assert list(PRESETS.values()) == sorted(PRESETS.values(), reverse=True)


def test_guard_spends_its_budget_and_stops():
    guard = Guard(31.0, 2.0, 1.0)
    assert guard.add(0.1, 0.04, 0.1) == "go" and guard.expected_db > 31
    assert guard.add(0.3, 0.2, 0.4) == "tighten"
    assert guard.add(0.5, 0.4, 0.9) == "stop" and guard.expected_db < 31
    assert Guard(31.0, 2.0, 1.0).add(0.3, 0.2, 0.9) == "go", "late, as much is due"
    assert Guard(31.0, 2.0, 1.0).add(0.1, math.nan, 0.5) == "stop"
    assert to_db(0.04, 2.0) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("sampler", "count"), [("euler", 4), ("heun", 7), ("dpm_2", 7), ("dpmpp_2m", 4)]
)
def test_contracts_list_every_call(sampler, count):
    sigmas = (1.0, 0.8, 0.5, 0.2, 0.0)
    calls = contract(sampler).calls(sigmas)
    assert len(calls) == count and calls[0] == 1.0 and calls == sorted(calls, reverse=True)


def test_contracts_refuse_noise_and_the_unknown():
    assert contract("euler", {"s_churn": 0.5}).kind == "refused"
    assert contract("euler", {"s_churn": 0.0}).kind == "single"
    for name in ("lcm", "euler_ancestral", "res_multistep_cfg_pp", "my_sampler"):
        assert contract(name).kind == "refused" and contract(name).why


@pytest.mark.parametrize(
    "sigmas",
    [(1.0, 0.5, 0.0), (1.0, 0.5, 0.7, 0.2, 0.0), (1.0, 0.5, 0.0, 0.0, 0.0), (math.nan,) * 6],
)
def test_schedules_that_cannot_be_reused_on_say_why(sigmas):
    assert schedule_fault(sigmas)


def test_leftover_noise_is_no_fault():
    assert schedule_fault((1.0, 0.9, 0.8, 0.7, 0.6)) is None


def test_signature_is_small_finite_and_tells_prompts_apart():
    probe = AttentionProbe()
    for layer in range(6):
        probe.see(torch.randn(2, 50, 32) + layer)
    c, u = prompt_mean(1), prompt_mean(2)
    made = signature(c, c, u, probe)
    assert made.dtype == np.float16 and 40 < made.size < 600 and np.isfinite(made).all()
    others = [signature(prompt_mean(i), prompt_mean(i), u, probe) for i in range(3, 30)]
    near = signature(c + 0.05 * prompt_mean(40), c, u, probe)
    assert smallest(Ranking([*others, near]).distances(made), 3)[0] == len(others)


def test_architecture_depends_on_names_and_shapes_alone():
    a = architecture([("q", (4, 4)), ("k", (4, 2))])
    assert a == architecture([("k", (4, 2)), ("q", (4, 4))])
    assert a != architecture([("q", (4, 4)), ("k", (4, 3))])


def test_the_bank_is_small_stable_and_depends_on_the_seed_alone():
    picks = [bank_index(seed) for seed in range(500)]
    assert set(picks) == set(range(BANK_SIZE)) and bank_index(7) == picks[7]
    seeds = {bank_seed(i) for i in range(BANK_SIZE)}
    assert len(seeds) == BANK_SIZE and all(0 <= s < 2**63 for s in seeds)
