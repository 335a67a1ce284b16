"""The engine on a closed-form model: miss, hit, exact hit, and every way to fail closed."""

from __future__ import annotations

from dataclasses import replace

import gaussian
import pytest
import torch
from gaussian import (
    Model,
    db,
    dense,
    generate,
    noise,
    prompt_mean,
    request,
    sample,
    schedule,
)

from carnator import matching
from carnator.engine import Run
from carnator.matching import may_use_bank_noise
from carnator.request import Settings


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_miss_is_bit_identical(store, cfg):
    latent, run, calls = generate(store, "a", prompt_mean(1), cfg=cfg)
    assert run.report.decision == "miss" and calls == 20
    assert torch.equal(latent, dense(Model(prompt_mean(1), cfg), noise(), schedule()))
    assert run.report.record == "submitted" and store.stats().records == 1


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_small_tweak_hits_and_stays_close(store, cfg):
    base = prompt_mean(1)
    generate(store, "a", base, cfg=cfg)
    tweak = base + prompt_mean(2, 0.05)
    latent, run, calls = generate(store, "b", tweak, cfg=cfg)
    assert run.report.decision == "hit", run.report.text()
    assert calls == run.report.evaluations < 12
    assert run.report.dense_evaluations == 20 and len(run.report.steps) == 20
    assert db(latent, dense(Model(tweak, cfg), noise(), schedule())) > 31
    assert run.report.scope is not None and run.report.scope.shape == (3, 6, 6)
    assert store.stats().records == 1, "only dense runs donate"


def test_the_hit_follows_the_target_not_the_donor(store):
    base = prompt_mean(1)
    donor, _, _ = generate(store, "a", base)
    tweak = base + prompt_mean(2, 0.1)
    latent, run, _ = generate(store, "b", tweak)
    own = dense(Model(tweak), noise(), schedule())
    assert run.report.decision == "hit"
    assert db(latent, own) > db(latent, donor) + 10


def test_unrelated_prompt_is_refused_untouched(store):
    generate(store, "a", prompt_mean(1, 3.0))
    latent, run, calls = generate(store, "z", prompt_mean(9, 3.0))
    assert run.report.decision == "miss" and calls == 20
    assert run.report.d0 is not None and "near enough" in run.report.reason
    assert torch.equal(latent, dense(Model(prompt_mean(9, 3.0)), noise(), schedule()))


@pytest.mark.parametrize("cfg", [1.0, 3.0, 8.0])
def test_exact_hit_serves_the_stored_latent(store, cfg):
    first, _, _ = generate(store, "a", prompt_mean(1), cfg=cfg)
    again, run, calls = generate(store, "a", prompt_mean(1), cfg=cfg)
    assert run.report.decision == "exact" and calls == 1
    assert torch.equal(first, again)


def test_exact_hits_can_be_switched_off(store):
    generate(store, "a", prompt_mean(1))
    _, run, calls = generate(store, "a", prompt_mean(1), settings=Settings(exact_hits=False))
    assert run.report.decision == "hit" and calls > 1


def test_same_words_but_other_weights_are_no_exact_hit(store):
    """Equal keys are not enough: the probe's own output must agree too."""
    generate(store, "a", prompt_mean(1))
    _, run, calls = generate(store, "a", prompt_mean(1) + prompt_mean(3, 0.02))
    assert run.report.decision != "exact" and calls > 1


@pytest.mark.parametrize("part", ["noise", "model", "shape"])
def test_hard_keys_part_the_store(store, part):
    generate(store, "a", prompt_mean(1))
    hard = {"shape": "s", "noise": "0", "model": "gaussian", part: "other"}
    _, run, calls = generate(store, "b", prompt_mean(1), hard=hard)
    assert run.report.decision == "miss" and calls == 20


def test_other_steps_shift_and_cfg_find_the_donor(store):
    base = prompt_mean(1)
    generate(store, "a", base, cfg=3.0)
    other = schedule(26, 3.0)
    latent, run, calls = generate(store, "a", base, cfg=3.3, sigmas=other)
    assert run.report.decision == "hit" and calls < 20
    assert db(latent, dense(Model(base, 3.3), noise(), other)) > 31


def test_probe_is_not_evaluated_twice(store):
    base = prompt_mean(1)
    generate(store, "a", base)
    first, model = Run(Settings(), request("b"), store), Model(base)
    first.denoise(noise(), 1.0, lambda: model(noise(), 1.0))
    first.abandon("the probe is all that was wanted")
    run = Run(Settings(), request("b"), store, probe=first.probe, verdict=first.match)
    sample(run, model, noise(), schedule())
    assert run.report.decision == "hit" and model.calls == run.report.evaluations


def test_a_probe_of_another_latent_is_not_used(store):
    first, model = Run(Settings(), request("b"), store), Model(prompt_mean(1))
    first.denoise(noise(), 1.0, lambda: model(noise(), 1.0))
    run = Run(Settings(), request("b"), store, probe=first.probe)
    latent = sample(run, model, noise(7), schedule())
    assert torch.equal(latent, dense(Model(prompt_mean(1)), noise(7), schedule()))


def test_bank_noise_belongs_to_the_first_seed_that_asks_even_if_its_run_was_a_hit(store):
    """A hit leaves no record, yet a second seed must not be given the very same clip."""
    first = request("a", hard={"noise": "bank 3", "model": "gaussian"}, seed=1)
    second = request("a", hard={"noise": "bank 3", "model": "gaussian"}, seed=2)
    other = request("b", hard={"noise": "bank 3", "model": "gaussian"}, seed=2)
    assert may_use_bank_noise(first, store) and may_use_bank_noise(first, store)
    assert not may_use_bank_noise(second, store) and may_use_bank_noise(other, store)
    assert may_use_bank_noise(second, None)
    store.clear()
    assert may_use_bank_noise(second, store)


def test_reuse_and_recording_off_touch_nothing(store):
    settings = Settings(reuse=False, record=False)
    latent, run, calls = generate(store, "a", prompt_mean(1), settings=settings)
    assert run.report.decision == "dense" and "switched off" in run.report.reason
    assert calls == 20 and store.stats().records == 0
    assert torch.equal(latent, dense(Model(prompt_mean(1)), noise(), schedule()))


def test_report_is_plain_data(store):
    import json

    base = prompt_mean(1)
    generate(store, "a", base)
    _, run, _ = generate(store, "b", base + 0.02)
    data = json.loads(json.dumps(run.report.as_dict()))
    assert data["decision"] == "hit" and data["evaluations"] < data["dense_evaluations"]
    assert "Evaluations" in run.report.text()


@pytest.mark.parametrize(
    "bad", [{"preset": "turbo"}, {"noise_policy": "x"}, {"preset": "custom"}, {"budget_db": 5.0}]
)
def test_settings_refuse_nonsense(bad):
    with pytest.raises(ValueError, match="use one of|needs|out of range"):
        Settings(**bad)


def test_a_candidate_is_decided_at_the_second_evaluation(store):
    """At sigma 1 both prompts look alike; only then do their paths part."""
    base = prompt_mean(1)
    generate(store, "a", base)

    class Late(Model):
        def __call__(self, x, sigma):
            self.mean = base if sigma == 1.0 else prompt_mean(9, 3.0)
            return super().__call__(x, sigma)

    run, model = Run(Settings(), request("b"), store), Late(base)
    seen = []
    for step, sigma in enumerate(schedule()[:2]):
        run.denoise(noise(), sigma, lambda s=sigma: model(noise(), s))
        seen.append(run.match.decision)
        assert run.report.d1 is None or step == 1
    assert seen == ["candidate", "miss"] and run.report.d1 > 0.5 > run.report.d0
    plain, watched = Late(base), Run(Settings(), request("b"), store)
    latent = sample(watched, plain, noise(), schedule())
    assert torch.equal(latent, dense(Late(base), noise(), schedule()))
    assert watched.report.record == "submitted" and plain.calls == 20


def test_of_several_candidates_the_second_evaluation_chooses(store):
    base = prompt_mean(1)
    for name, away in (("far", 0.3), ("near", 0.02), ("middle", 0.1)):
        generate(store, name, base + prompt_mean(3, away), settings=Settings(reuse=False))
    _, run, _ = generate(store, "b", base)
    assert run.report.decision == "hit" and run.report.donor_label == "near"


@pytest.mark.parametrize("lacking", ["single+cfg", "single"])
def test_another_guidance_scale_is_judged_by_its_own_rows_too(store, monkeypatch, lacking):
    base = prompt_mean(1)
    generate(store, "a", base, cfg=3.0)
    kinds = {k: v for k, v in gaussian.TABLE.kinds.items() if k != lacking}
    bare = replace(gaussian.TABLE, kinds=kinds)
    monkeypatch.setattr(matching, "table_for", lambda a: bare)
    _, run, calls = generate(store, "a", base, cfg=3.3)
    assert run.report.decision == "miss" and repr(lacking) in run.report.reason and calls == 20


def test_a_run_of_one_step_stays_dense(store):
    short = (*schedule()[:1], 0.0)
    generate(store, "a", prompt_mean(1))
    _, run, calls = generate(store, "b", prompt_mean(1), sigmas=short)
    assert run.report.decision in ("miss", "dense") and run.report.reason and calls == 1
