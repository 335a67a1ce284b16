"""Every way the engine fails closed, on a closed-form model."""

from __future__ import annotations

import logging

import pytest
import torch
from gaussian import (
    Model,
    dense,
    euler,
    generate,
    noise,
    prompt_mean,
    request,
    sample,
    schedule,
)

from carnator.engine import Run
from carnator.request import Evaluation, Settings
from carnator.store import Draft


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


@pytest.mark.parametrize(
    "lie",
    [
        {"sigmas": []},
        {"sigmas": "many"},
        {"sigmas": [1.0, 0.5, 0.7]},
        {"shape": None},
        {"shape": [1, 4, 3, 6, 7]},
        {"rms": "big"},
        {"cfg": None},
    ],
)
def test_records_that_lie_about_themselves_are_passed_over(store, lie):
    generate(store, "a", prompt_mean(1))
    entry = store.entries()[0]
    tensors = store.read(entry.id, ["first", *(f"d.{i}" for i in range(1, 20))])
    store.clear()
    store.put(Draft(entry.partition, "x", {**entry.meta, **lie}, tensors, entry.signature))
    latent, run, calls = generate(store, "b", prompt_mean(1))
    assert run.report.decision == "miss" and calls == 20 and not run.report.notes
    assert torch.equal(latent, dense(Model(prompt_mean(1)), noise(), schedule()))


def test_a_record_without_its_tensors_is_dropped_and_the_run_goes_on(store):
    generate(store, "a", prompt_mean(1))
    entry = store.entries()[0]
    first = store.read(entry.id, ["first"])
    store.clear()
    store.put(Draft(entry.partition, "x", entry.meta, first, entry.signature))
    latent, run, calls = generate(store, "b", prompt_mean(1))
    assert run.report.decision == "miss" and "dropped" in run.report.reason and calls == 20
    assert torch.equal(latent, dense(Model(prompt_mean(1)), noise(), schedule()))
    assert [e.meta["label"] for e in store.entries()] == ["b"]


def test_a_run_lost_to_nan_is_reported_without_an_internal_error(store, caplog):
    generate(store, "a", prompt_mean(1))
    run, model = Run(Settings(), request("b"), store), Model(prompt_mean(1) + 0.01)
    with caplog.at_level(logging.WARNING, logger="carnator"):
        lost = lambda s: 1 if s > 0.98 else torch.nan  # noqa: E731
        ask = lambda x, s: run.denoise(x, s, lambda: model(x * lost(s), s))  # noqa: E731
        run.finish(euler(ask, noise(), schedule()))
    assert run.report.decision == "hit" and run.report.measured_db == -float("inf")
    assert sum("every step is evaluated" in note for note in run.report.notes) == 1
    assert not caplog.records


def test_a_much_coarser_run_is_no_donor(store):
    """Its first evaluation is the same, so that D0 is nothing, but its path strays."""
    base = prompt_mean(1)
    generate(store, "a", base, sigmas=schedule(6))
    _, run, calls = generate(store, "b", base)
    assert run.report.decision == "miss" and calls == 20
    _, run, _ = generate(store, "b", base, sigmas=schedule(12))
    assert run.report.decision == "hit", "a finer one is"


@pytest.mark.parametrize("sampler", ["euler_ancestral", "lcm", "euler_cfg_pp", "unheard_of"])
def test_another_kind_of_path_is_not_recorded(store, sampler):
    _, run, _ = generate(store, "a", prompt_mean(1), sampler=sampler)
    assert "is no donor" in run.report.record and store.stats().records == 0


def test_a_sampler_may_write_into_what_it_is_given(store):
    run, model = Run(Settings(), request("a"), store), Model(prompt_mean(1))

    def spoiling(x, s):
        given = run.denoise(x, s, lambda: model(x, s))
        used = given.clone()
        given.fill_(float("nan"))
        return used

    run.finish(euler(spoiling, noise(), schedule()))
    assert store.flush(20) and store.stats().records == 1


def test_a_high_first_sigma_does_not_hide_another_prompt(store):
    """Models of noise start at sigma 14 or more, where prompts hardly show in the derivative."""
    sigmas = tuple(14 * s for s in schedule())
    for prompt, mean in (("a", prompt_mean(1)), ("z", prompt_mean(9))):
        run, result = Run(Settings(), request(prompt, sigmas=sigmas), store), Evaluation(mean, mean)
        run.finish(
            euler(lambda x, s, r=run, e=result: r.denoise(x, s, lambda: e), 14 * noise(), sigmas)
        )
        assert store.flush(20)
    assert run.report.decision == "miss" and store.stats().records == 2, run.report.text()
