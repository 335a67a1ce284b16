"""The competitors' rules: what each decides on inputs worked out by hand, and that it runs so."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks import batch
from benchmarks.competitors import (
    COMPETITORS,
    Case,
    Path,
    Pool,
    cacheseek,
    case,
    landing,
    nirvana,
    paths,
    plain,
    redi,
    teacache,
    vllm_omni,
)
from benchmarks.competitors.easycache import ChangeRate, EasyCache, percent_to_sigma
from benchmarks.competitors.internals import Stack, shortened
from benchmarks.competitors.lazycache import LazyCache
from carnator.demo import captions, host
from carnator.demo.hunyuan import HunyuanConfig, HunyuanTransformer
from carnator.demo.ltx import LTXConfig, LTXTransformer
from carnator.demo.model import EmbeddedModel
from carnator.demo.wan import WanConfig, WanTransformer

RED = captions.parse("red circle left on gray")
SQUARE = captions.parse("red square left on gray")
OTHER = captions.parse("cyan triangle up and blue square still on white")
FAMILIES = {
    "wan": lambda: WanTransformer(WanConfig(dim=24, ffn_dim=32, num_heads=2, num_layers=2)),
    "hunyuan": lambda: HunyuanTransformer(HunyuanConfig(double_blocks=1, single_blocks=2)),
    "ltx": lambda: LTXTransformer(LTXConfig(dim=24, num_heads=2, num_layers=2)),
}


def make(family: str) -> EmbeddedModel:
    """A small model with random weights whose every part matters."""
    torch.manual_seed(0)
    network = FAMILIES[family]()
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.2 if p.ndim < 2 else p[0].numel() ** -0.5)
    return EmbeddedModel(network, family)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def any_model(request):
    return make(request.param)


@pytest.fixture(scope="module")
def model():
    return make("wan")


def requests(model, steps=12, what=(SQUARE, OTHER), seeds=(3, 4)):
    return batch.Batch.of(model, what, seeds, [4.0] * len(what), steps)


def pairs_of(targets):
    return [batch.Pair("shape", RED, t, s) for t, s in zip(targets.captions, (3, 4), strict=True)]


@pytest.fixture(scope="module")
def known(model):
    """A case of two targets whose donors say something else from the same noise."""
    targets = requests(model)
    donors = paths(requests(model, what=(RED, RED)))[2]
    pool = Pool(model, 3, pairs_of(targets))
    return Case(targets, donors, pool, np.poly1d([1.0, 0.0]))


# Tables and formulas.


@pytest.mark.parametrize(
    ("similarity", "steps"),
    [(1.0, 25), (0.96, 25), (0.95, 20), (0.9, 15), (0.85, 10), (0.75, 5), (0.651, 5), (0.65, 0)],
)
def test_nirvanas_table(similarity, steps):
    assert nirvana.skipped(similarity) == steps


@pytest.mark.parametrize(
    ("similarity", "steps", "skipped"),
    [(0.749, 30, 0), (0.75, 30, 5), (0.875, 30, 10), (1.0, 30, 15), (0.9, 50, 17), (1.0, 10, 5)],
)
def test_vllm_omnis_line(similarity, steps, skipped):
    assert vllm_omni.skipped(similarity, steps) == skipped


@pytest.mark.parametrize(("score", "steps"), [(0.62, 0), (0.63, 3), (0.84, 3), (0.85, 11), (1, 11)])
def test_cacheseeks_staircase(score, steps):
    assert cacheseek.skipped(score) == steps


def test_a_depth_is_a_share_of_the_schedule():
    assert landing.depth(0.5, 1.0, 30) == 15 and landing.depth(0.5, 0.5, 30) == 8
    assert landing.depth(0.02, 0.1, 30) == 1  # a hit skips at least one step
    assert landing.depth(0.9, 1.25, 30) == 29  # and evaluates at least one
    assert landing.depth(0.0, 1.25, 30) == 0


def test_redi_takes_the_nearest_key_and_its_least_squares_weight():
    keys = [torch.tensor([5.0, 0.0]), torch.tensor([0.0, 2.0])]
    index, weight = redi.nearest(torch.tensor([1.0, 3.0]), keys)
    assert (index, weight) == (1, 1.5)
    assert redi.key_step(50) == 10 and redi.key_step(30) == 6


def test_the_similarity_of_conditionings_orders_captions():
    assert case.similarity(RED, RED) == pytest.approx(1)
    assert 0.8 < case.similarity(RED, SQUARE) < 0.95
    assert case.similarity(RED, OTHER) < 0.65


def test_steps_are_scaled_to_the_length_of_the_run():
    assert [plain.steps_for(10, n) for n in (30, 24, 40)] == [10, 8, 13]
    assert plain.steps_for(26, 20) == 17 and plain.steps_for(1, 30) == 2


# Caches within a run.


def value(number: float) -> torch.Tensor:
    return torch.full((1, 1, 1, 1, 1), number)


def test_the_change_rate_adds_up_until_the_threshold():
    state, row = ChangeRate(0.2, 1), torch.tensor([0])
    assert not state.skips(value(1.0))
    state.learn(row, value(1.0), value(2.0), torch.tensor([2.0]))
    assert not state.skips(value(1.5))  # no rate is known yet
    state.learn(row, value(1.5), value(2.5), torch.tensor([2.5]))
    assert state.rate == 1.0  # 0.5 of output for 0.5 of input
    assert state.skips(value(1.75)) and float(state.total) == pytest.approx(0.25 / 2.5)
    # The change is from the last evaluation, and is added to what was added before.
    assert not state.skips(value(1.9)) and float(state.total) == 0  # 0.1 + 0.4 / 2.5
    state.learn(row, value(1.9), value(2.7), torch.tensor([2.7]))
    assert float(state.rate) == pytest.approx(0.5)


def test_every_row_has_a_change_rate_of_its_own():
    state, rows = ChangeRate(0.2, 2), torch.tensor([0, 1])
    both = lambda a, b: torch.cat([value(a), value(b)])  # noqa: E731
    state.skips(both(1.0, 1.0))
    state.learn(rows, both(1.0, 1.0), both(2.0, 2.0), torch.tensor([2.0, 2.0]))
    state.skips(both(1.5, 1.5))
    state.learn(rows, both(1.5, 1.5), both(2.5, 6.0), torch.tensor([2.5, 6.0]))
    assert state.rate.tolist() == [1.0, 8.0]
    assert state.skips(both(1.75, 1.75)).tolist() == [True, False]  # 0.1 and 2 / 6
    state.learn(torch.tensor([1]), value(1.75), value(6.1), torch.tensor([6.1]))
    assert state.rate[0] == 1.0 and float(state.rate[1]) == pytest.approx(0.4)
    assert float(state.total[0]) == pytest.approx(0.1) and state.total[1] == 0


def test_percents_are_the_hosts():
    assert percent_to_sigma(0.15, 5.0) == pytest.approx(5 * 0.85 / 4.4)
    assert percent_to_sigma(0.0, 5.0) == 1.0


@pytest.mark.parametrize("rule", [EasyCache, LazyCache])
def test_a_host_cache_skips_between_its_percents_alone(model, rule):
    targets = requests(model, steps=20)
    dense, _ = targets.dense()
    never = rule(targets, 0.0).outcome()
    assert never.evaluations.tolist() == [20, 20]
    torch.testing.assert_close(never.latents, dense)
    always = rule(targets, 1e9).outcome()
    before = int((targets.sigmas > rule(targets, 0).start).sum())
    after = int((targets.sigmas[:-1] <= rule(targets, 0).end).sum())
    # The network's rule starts to watch at its first percent, the simpler one has watched before.
    first = before + 2 if rule is EasyCache else before + 1
    assert always.evaluations.tolist() == [first + after] * 2
    assert not torch.allclose(always.latents, dense, atol=1e-3)


@pytest.mark.parametrize("rule", [EasyCache, LazyCache])
def test_a_batched_host_cache_is_the_same_as_one_by_one(model, rule):
    targets, threshold = requests(model, steps=20), 0.1
    both = rule(targets, threshold).outcome()
    alone = [rule(targets.select([i]), threshold).outcome() for i in (0, 1)]
    assert both.evaluations.tolist() == [int(a.evaluations) for a in alone]
    torch.testing.assert_close(both.latents, torch.cat([a.latents for a in alone]))


def test_a_model_without_its_blocks_answers_from_their_residual(any_model):
    targets, sigma = requests(any_model), 0.9
    with torch.no_grad(), Stack(any_model) as stack:
        whole = targets.branches(targets.noise, sigma)
        short = shortened(any_model, stack.residual)
        same = targets.branches(targets.noise, sigma, short)
        none = targets.branches(targets.noise, sigma, shortened(any_model, 0 * stack.residual))
    for a, b in zip(whole, same, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(whole[0], none[0], atol=1e-2)
    with torch.no_grad():  # the model itself is as it was
        assert torch.equal(targets.branches(targets.noise, sigma)[0], whole[0])


def test_teacache_adds_up_rescaled_changes(model, monkeypatch):
    levels = iter([1.0, 1.1, 1.21, 1.331, 1.4641, 1.61051, 1.771561, 1.9487171])  # 10 % a step
    monkeypatch.setattr(teacache, "signals", lambda b, x, s: value(next(levels)).view(1, 1))
    targets = requests(model, steps=8, what=(RED,), seeds=(3,))
    rule = teacache.TeaCache(targets, 0.45, np.poly1d([2.0, 0.0]))  # 0.2 a step
    asked = []
    wants = rule.wants
    rule.wants = lambda x, s: asked.append(wants(x, s)) or asked[-1]
    out = rule.outcome()
    assert [bool(a) for a in asked] == [True, False, False, True, False, False, True, False]
    assert out.evaluations.tolist() == [3]


def test_teacache_keeps_the_steps_its_ports_keep():
    assert teacache.always("wan", 50) == (5, 50) and teacache.always("wan", 30) == (3, 30)
    assert teacache.always("hunyuan", 30) == (1, 29) == teacache.always("ltx", 30)


def test_teacache_runs_on_every_backbone(any_model):
    rescale = teacache.fit(any_model, 1)
    assert len(rescale.coeffs) <= teacache.DEGREE + 1 and np.isfinite(rescale.coeffs).all()
    targets = requests(any_model)
    dense, _ = targets.dense()
    never = teacache.TeaCache(targets, -1e9, rescale).outcome()
    assert never.evaluations.tolist() == [12, 12]
    torch.testing.assert_close(never.latents, dense, atol=1e-4, rtol=1e-4)
    always = teacache.TeaCache(targets, 1e9, rescale).outcome()
    first, last = teacache.always(any_model.family.name, 12)
    assert always.evaluations.tolist() == [first + 12 - last] * 2
    assert not torch.allclose(always.latents, dense, atol=1e-3)


# Landing.


def test_a_path_is_known_between_its_nodes():
    path = Path(RED, 2, [1.0, 0.5, 0.0], torch.tensor([[4.0], [2.0], [1.0]]))
    assert [float(path.at(s)) for s in (1.0, 0.75, 0.5, 0.25, 0.0)] == [4, 3, 2, 1.5, 1]
    with pytest.raises(ValueError, match="from 1.0 to 0.0 only"):
        path.at(1.1)


def test_a_landing_goes_on_from_the_donors_latent(known):
    jumps = [landing.Jump("donor", known.donors[0], 5), None]
    out = landing.land(known, jumps)
    assert out.evaluations.tolist() == [7, 12]
    sigmas, one = known.targets.sigmas, known.targets.select([0])
    with torch.no_grad():
        rest = host.euler(
            lambda x, s: one.branches(x, s)[0], known.donors[0].states[5][None], sigmas[5:]
        )
    torch.testing.assert_close(out.latents[:1], rest, atol=1e-4, rtol=1e-4)
    dense, _ = known.targets.dense()
    torch.testing.assert_close(out.latents[1:], dense[1:], atol=1e-5, rtol=1e-5)
    calls = known.targets.model.calls
    assert torch.equal(landing.land(known, jumps).latents, out.latents)
    assert known.targets.model.calls == calls  # the same landing is not run twice


def test_redis_jump_starts_from_the_targets_own_steps(known):
    known = dataclasses.replace(known, pool=Pool(known.targets.model, 0, []), landings={})
    out = redi.run(known, 0.5)
    assert out.evaluations.tolist() == [2 + 6, 2 + 6]
    assert [name for name, _, _ in known.retrieved] == ["donor", "donor"]
    key = float(known.targets.sigmas[2])
    states: list[torch.Tensor] = []
    known.targets.dense(watch=states.append)
    expected = float((states[2][0] * known.donors[0].at(key)).sum())
    expected /= float(known.donors[0].at(key).square().sum())
    assert known.retrieved[0][2] == pytest.approx(expected, rel=1e-4)
    with torch.no_grad():
        goal = expected * known.donors[0].states[6][None]
        one = known.targets.select([0])
        rest = host.euler(lambda x, s: one.branches(x, s)[0], goal, known.targets.sigmas[6:])
    torch.testing.assert_close(out.latents[:1], rest, atol=1e-3, rtol=1e-3)


def test_redi_retrieves_among_the_runs_of_its_own_noise(known):
    fresh = dataclasses.replace(known, retrieved=None)
    first, second = (name for name, _, _ in redi.retrieved(fresh))
    assert first in {"donor", "pool 0", "pool 2"} and second in {"donor", "pool 1"}


def test_text_retrieves_the_most_similar_run(known):
    name, path, alike = known.by_text(0)
    assert (name, path) == ("donor", known.donors[0])
    assert alike == pytest.approx(case.similarity(RED, SQUARE))
    known.pool.captions[1] = OTHER  # the very prompt of the second target
    name, path, alike = known.by_text(1)
    assert name == "pool 1" and alike == pytest.approx(1)
    assert path.steps == host.STEPS
    # The donor has the targets' 12 steps, the pool's runs have 30.
    assert known.by_text(1, same_steps=True)[0] == "donor"


def test_the_pool_knows_the_beginning_of_the_runs_it_would_make(model):
    targets = requests(model)
    pool = Pool(model, 4, pairs_of(targets))
    assert len(pool) == 4 and pool.seeds == [3, 4, 3, 4]
    assert not {str(c) for c in pool.captions} & {str(c) for c in targets.captions}
    whole = pool.path(2)
    assert len(whole.states) == host.STEPS + 1 and len(pool.early[2].states) == case.EARLY + 1
    torch.testing.assert_close(
        pool.early[2].states, whole.states[: case.EARLY + 1], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("competitor", COMPETITORS, ids=lambda c: c.name)
def test_a_competitor_runs_at_every_kind_of_knob(known, competitor):
    case = dataclasses.replace(known, landings={}, retrieved=None)
    knob = competitor.published or competitor.knobs[len(competitor.knobs) // 2]
    assert knob in competitor.knobs
    out = competitor.run(case, knob)
    assert out.latents.shape == known.targets.noise.shape
    assert bool(torch.isfinite(out.latents).all())
    assert all(1 <= n <= known.targets.steps for n in out.evaluations.tolist())
    assert competitor.source and competitor.label


def test_knobs_of_a_curve_run_from_few_evaluations_to_many(known):
    for competitor in COMPETITORS:
        case = dataclasses.replace(known, landings={}, retrieved=None)
        few, many = (competitor.run(case, competitor.knobs[i]).evaluations.sum() for i in (0, -1))
        assert few <= many, competitor.name
