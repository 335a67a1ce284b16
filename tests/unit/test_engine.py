"""The engine on a closed-form model: miss, hit, exact hit, and every way to fail closed."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from gaussian import Model, euler, noise, prompt_mean, request, sample, schedule

from carnator.engine import Run
from carnator.matching import may_use_bank_noise
from carnator.request import Settings
from carnator.store import Draft, Store


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store") as made:
        yield made


def dense(model: Model, x, sigmas):
    return euler(lambda x, s: model(x, s).denoised, x, sigmas)


def db(a, b) -> float:
    return 10 * math.log10(4 / float((a - b).square().mean()))


def generate(store, prompt, mean, *, settings=None, cfg=1.0, seed=0, sigmas=None, **changes):
    """One request through the engine: (latent, run, model calls)."""
    sigmas = sigmas or schedule()
    run = Run(
        settings or Settings(), request(prompt, cfg=cfg, seed=seed, sigmas=sigmas, **changes), store
    )
    model = Model(mean, cfg)
    latent = sample(run, model, noise(seed), sigmas)
    store.flush()
    return latent, run, model.calls


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
    assert run.report.d0 is not None and "too different" in run.report.reason
    assert torch.equal(latent, dense(Model(prompt_mean(9, 3.0)), noise(), schedule()))


def test_exact_hit_serves_the_stored_latent(store):
    first, _, _ = generate(store, "a", prompt_mean(1), cfg=3.0)
    again, run, calls = generate(store, "a", prompt_mean(1), cfg=3.0)
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


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        ("euler_ancestral", "injects noise"),
        ("nobody_knows", "not known"),
        ("euler_cfg_pp", "uncond"),
    ],
)
def test_unsound_samplers_run_dense_and_say_why(store, sampler, why):
    generate(store, "a", prompt_mean(1))
    _, run, calls = generate(store, "b", prompt_mean(1), sampler=sampler)
    assert run.report.decision == "dense" and why in run.report.reason and calls == 20


def test_rising_sigmas_run_dense_and_say_why(store):
    generate(store, "a", prompt_mean(1))
    zigzag = (1.0, 0.8, 0.9, 0.6, 0.4, 0.2, 0.0)
    run = Run(Settings(), request("b", sigmas=zigzag), store)
    model = Model(prompt_mean(1))
    latent = sample(run, model, noise(), zigzag)
    assert run.report.decision == "dense" and "monotonically" in run.report.reason
    assert model.calls == 6 and torch.equal(latent, dense(Model(prompt_mean(1)), noise(), zigzag))


def test_a_sampler_that_leaves_its_contract_goes_on_dense(store):
    base = prompt_mean(1)
    generate(store, "a", base)
    run, model = Run(Settings(), request("b"), store), Model(base)
    odd = [*schedule()[:8], 0.93, 0.9, 0.5, 0.3, 0.1]
    assert odd[8] not in schedule()
    x = noise()
    for sigma in odd:
        run.denoise(x, sigma, lambda s=sigma: model(x, s))
    kinds = [step.kind for step in run.report.steps]
    assert "predicted" in kinds[:8] and set(kinds[8:]) == {"evaluated"}
    assert "not expected" in run.report.text()


def test_nan_stops_reuse_and_is_never_recorded(store):
    generate(store, "a", prompt_mean(1))
    run, model = Run(Settings(), request("b"), store), Model(prompt_mean(1) + 0.01)

    def broken(x, s):
        out = model(x, s)
        if s < 0.9:
            out.denoised = out.denoised * float("nan")
        return out

    run.finish(euler(lambda x, s: run.denoise(x, s, lambda: broken(x, s)), noise(), schedule()))
    kinds = [step.kind for step in run.report.steps]
    first_bad = next(
        i for i, s in enumerate(run.report.steps) if s.kind == "evaluated" and s.sigma < 0.9
    )
    assert set(kinds[first_bad:]) == {"evaluated"}
    _, run, _ = generate(store, "nan", prompt_mean(1) * float("nan"), hard={"own": "partition"})
    assert "not finite" in run.report.record and store.stats().records == 1


def test_internal_error_falls_back_with_one_line(store, monkeypatch, caplog):
    base = prompt_mean(1)
    generate(store, "a", base)
    monkeypatch.setattr("carnator.engine.match", lambda *a: 1 / 0)
    with caplog.at_level(logging.WARNING, logger="carnator"):
        latent, run, calls = generate(store, "b", base)
    assert calls == 20 and torch.equal(latent, dense(Model(base), noise(), schedule()))
    assert sum("internal error" in r.message for r in caplog.records) == 1
    assert "ZeroDivisionError" in run.report.text()


def test_errors_of_the_model_are_not_swallowed(store):
    run = Run(Settings(), request("a"), store)

    def fail():
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        run.denoise(noise(), 1.0, fail)
    run.abandon("failed")
    store.flush()
    assert store.stats().records == 0


def test_cancelled_run_leaves_nothing(store):
    run, model, x = Run(Settings(), request("a"), store), Model(prompt_mean(1)), noise()
    for sigma in schedule()[:5]:
        run.denoise(x, sigma, lambda s=sigma: model(x, s))
    run.abandon("cancelled")
    store.flush()
    assert store.stats().records == 0 and "cancelled" in run.report.record


def test_guard_gives_a_bad_donor_up(store, monkeypatch):
    """A donor whose first derivative agrees but whose path then leaves: measured and dropped."""
    base = prompt_mean(1)
    generate(store, "a", base)
    late = prompt_mean(5, 9.0)

    class Turncoat(Model):
        def __call__(self, x, sigma):
            self.mean = base if sigma > 0.9 else late
            return super().__call__(x, sigma)

    run, model = Run(Settings(), request("b"), store), Turncoat(base)
    sample(run, model, noise(), schedule())
    assert run.report.decision == "hit"
    kinds = [step.kind for step in run.report.steps]
    assert "predicted" in kinds and set(kinds[-5:]) == {"evaluated"}
    assert "budget" in run.report.text()


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


@pytest.mark.parametrize(
    "lie",
    [
        {"sigmas": []},
        {"sigmas": "many"},
        {"sigmas": [1.0, 0.5, 0.7]},
        {"shape": None},
        {"shape": [1, 4, 3, 6, 7]},
        {"rms": "big"},
    ],
)
def test_records_that_lie_about_themselves_are_passed_over(store, lie):
    generate(store, "a", prompt_mean(1))
    entry = store.entries()[0]
    tensors = store.read(entry.id, [f"cond.{i}{s}" for i in range(20) for s in ("", ".scale")])
    store.clear()
    store.put(Draft(entry.partition, "x", {**entry.meta, **lie}, tensors, entry.signature))
    latent, run, calls = generate(store, "b", prompt_mean(1))
    assert run.report.decision == "miss" and calls == 20 and not run.report.notes
    assert torch.equal(latent, dense(Model(prompt_mean(1)), noise(), schedule()))


def test_a_record_without_its_tensors_is_dropped_and_the_run_goes_on(store):
    generate(store, "a", prompt_mean(1))
    entry = store.entries()[0]
    first = store.read(entry.id, ["cond.first"])
    store.clear()
    store.put(Draft(entry.partition, "x", entry.meta, first, entry.signature))
    latent, run, calls = generate(store, "b", prompt_mean(1))
    assert run.report.decision == "miss" and "dropped" in run.report.reason and calls == 20
    assert torch.equal(latent, dense(Model(prompt_mean(1)), noise(), schedule()))
    assert [e.meta["label"] for e in store.entries()] == ["b"]


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
