"""Every sampler the host lists, and what sampler packs do: odd schedules and own functions."""

from __future__ import annotations

from typing import Any

import comfy.model_patcher
import comfy.samplers
import pytest
import torch
from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced
from harness import part
from sampling import SMALL, TWEAK, advanced, empty, flush, guider, last_report, sample
from trial import FLOOR, attach, held, psnr, same

CONTRACTS = part("carnator.samplers")
STEPS = 10


def kind_of(name: str) -> str:
    try:
        key = part("nodes.refusals").sampler_name(comfy.samplers.sampler_object(name))
    except part("nodes.refusals").Unsupported:
        return "refused"
    return CONTRACTS.contract(key).kind


@pytest.mark.parametrize("name", comfy.samplers.SAMPLER_NAMES)
def test_every_sampler_reuses_or_says_why_not(small_model, store, name):
    """All kinds have rows in the tests' own risk table, so every contract is put to use."""

    def run(model: Any, words: str) -> torch.Tensor:
        return sample(model, words, sampler=name, steps=STEPS)

    ours, words = attach(small_model, store), "red circle left and blue square still on gray"
    first = held(run, small_model, ours, words)
    flush(store)
    if kind_of(name) == "refused":
        assert first.decision == "dense" and store.open().entries() == []
        return
    assert first.decision == "miss" and first.record == "submitted", first.record
    second = held(run, small_model, ours, TWEAK, floor=FLOOR - 5)
    assert second.decision == "hit", second.reason
    assert not second.notes, second.notes  # every call came where the contract says
    assert held(run, small_model, ours, words).decision == "exact"


def served(model: Any, sampler: Any, sigmas: torch.Tensor, words: str = TWEAK) -> torch.Tensor:
    noise, _, _ = advanced(model=model)
    made = SamplerCustomAdvanced.execute(noise, guider(model, words), sampler, sigmas, empty())
    return made[0]["samples"]


def outcome(run: Any, *args: Any) -> Any:
    """What a run gives: a latent, or the error it ends with."""
    try:
        return run(*args)
    except Exception as error:
        return type(error), str(error)


ODD = {
    "two zeros": [0.0, 0.0],
    "one step": [1.0, 0.0],
    "a single sigma": [1.0],
    "no final zero": [1.0, 0.8, 0.6, 0.4, 0.2],
    "a repeated sigma": [1.0, 0.8, 0.8, 0.5, 0.2, 0.0],
    "a zero in the middle": [1.0, 0.6, 0.0, 0.3, 0.1, 0.0],
    "rising": [0.2, 0.4, 0.6, 0.8, 1.0],
    "negative": [1.0, 0.7, 0.4, 0.2, -0.1],
    "beyond the model": [3.0, 2.0, 1.0, 0.5, 0.2, 0.0],
    "very fine": [float(s) for s in torch.linspace(1, 0, 80)],
}


@pytest.mark.parametrize("sigmas", ODD.values(), ids=list(ODD))
def test_odd_lists_of_sigmas(small_model, store, sigmas):
    """Sampler packs hand in what they like; it must come out as without Carnator, twice."""
    schedule, euler = torch.tensor(sigmas), comfy.samplers.sampler_object("euler")
    ours = attach(small_model, store)
    for _ in range(2):
        expected = outcome(served, small_model, euler, schedule)
        got = outcome(served, ours, euler, schedule)
        if isinstance(expected, tuple):
            assert got == expected
            continue
        assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(expected))
        if len(sigmas) > 1:
            assert last_report().decision in ("dense", "miss", "exact") and last_report().reason
            assert part("nodes.report").CarnatorReport.execute().args[1]
        flush(store)


def test_an_empty_list_of_sigmas(small_model, store):
    euler = comfy.samplers.sampler_object("euler")
    assert same(served(attach(small_model, store), euler, torch.zeros(0)), empty()["samples"])


def res_2s(model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args=None, **kwargs: Any):
    """As packs have it (RES4LYF): the exponential Runge-Kutta method of two stages, the second in
    the middle of a step in log sigma, and a look at what the host left in the options."""
    ones = x.new_ones([x.shape[0]])
    for now, after in zip(sigmas[:-1], sigmas[1:]):
        first = model(x, now * ones, **extra_args)
        if after == 0:
            x = first
            continue
        h = torch.log(now / after)
        middle = now * torch.exp(-h / 2)
        half = torch.exp(-h / 2) * x - torch.expm1(-h / 2) * first
        second = model(half, middle * ones, **extra_args)
        phi_1 = -torch.expm1(-h) / h
        phi_2 = (1 - phi_1) / h
        x = torch.exp(-h) * x + h * ((phi_1 - 2 * phi_2) * first + 2 * phi_2 * second)
    assert len(extra_args["model_options"]["transformer_options"]["sample_sigmas"])
    return x


def test_a_packs_own_sampler_runs_dense(small_model, store):
    _, _, sigmas = advanced(model=small_model)
    sampler, ours = comfy.samplers.KSAMPLER(res_2s), attach(small_model, store)
    for _ in range(2):
        assert same(served(ours, sampler, sigmas), served(small_model, sampler, sigmas))
        assert "'res_2s'" in last_report().reason and last_report().evaluations == 15
        flush(store)
    assert store.open().entries() == []


def reads_uncond(model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args=None, **kwargs: Any):
    """A sampler of the _cfg_pp kind under an innocent name: it needs the unconditional result."""
    seen: list[torch.Tensor] = []

    def keep(args: dict) -> torch.Tensor:
        seen[:] = [args["uncond_denoised"]]
        return args["denoised"]

    extra_args = dict(extra_args)
    extra_args["model_options"] = comfy.model_patcher.set_model_options_post_cfg_function(
        extra_args["model_options"], keep, disable_cfg1_optimization=True
    )
    ones = x.new_ones([x.shape[0]])
    for now, after in zip(sigmas[:-1], sigmas[1:]):
        seen.clear()
        denoised = model(x, now * ones, **extra_args)
        x = denoised + (x - seen[0]) / now * after  # raises if a step was not evaluated
    return x


@pytest.mark.parametrize("cfg", [1.0, 2.5])
def test_a_sampler_that_reads_the_unconditional_result(small_model, store, monkeypatch, cfg):
    """Known by what it does, not by its name: here it even passes for the host's euler."""
    monkeypatch.setattr(reads_uncond, "__name__", "sample_euler")
    monkeypatch.setattr(comfy.k_diffusion.sampling, "sample_euler", reads_uncond)

    def run(model: Any, words: str) -> torch.Tensor:
        return sample(model, words, cfg=cfg)

    ours = attach(small_model, store)
    for _ in range(2):
        report = held(run, small_model, ours, TWEAK)
        assert report.decision == "dense" and "guidance branches" in report.reason
        assert report.evaluations == report.dense_evaluations == 8
        flush(store)
    assert store.open().entries() == []


@pytest.mark.parametrize("name", ["euler_cfg_pp", "euler", "heun", "res_multistep_cfg_pp"])
def test_the_pipeline_probes_any_sampler(small_model, store, name):
    """The probe's evaluation is made outside the sampler that goes on from it."""
    nodes = part("nodes.pipeline")
    noise, method, sigmas = advanced(name, model=small_model)
    five = (noise, guider(small_model), method, sigmas, empty())
    probe = nodes.CarnatorProbe.execute(*five)[0]
    found, accepted, _ = nodes.CarnatorSignatureMatch.execute(probe, "balanced", store=store).args
    got = nodes.CarnatorSparseAttentionSampler.execute(*five, found)
    plain = SamplerCustomAdvanced.execute(*five)
    assert not accepted and same(got[0]["samples"], plain[0]["samples"])
    assert got[2].reason


@pytest.mark.parametrize("option", ["s_churn", "s_noise"])
def test_samplers_with_options(small_model, store, option):
    """Euler with churn injects noise; with another scale of a noise it never adds it does not."""
    _, _, sigmas = advanced(model=small_model)
    sampler, ours = comfy.samplers.ksampler("euler", {option: 0.5}), attach(small_model, store)

    def run(model: Any, words: str) -> torch.Tensor:
        torch.manual_seed(0)
        return served(model, sampler, sigmas, words)

    assert held(run, small_model, ours, "red circle left on gray").decision == (
        "dense" if option == "s_churn" else "miss"
    )
    flush(store)
    second = held(run, small_model, ours, "green circle left on gray")
    assert second.decision == ("dense" if option == "s_churn" else "hit")


def test_previews_and_progress_on_predicted_steps(small_model, store):
    """Every step is reported once and in order, with latents a previewer can show."""
    ours = attach(small_model, store)
    sample(ours, "red circle left on gray")
    flush(store)
    seen: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
    expected: list[torch.Tensor] = []
    sample(small_model, TWEAK, callback=lambda i, d, x, n: expected.append(d.clone()))
    sample(ours, TWEAK, callback=lambda i, d, x, n: seen.append((i, n, d.clone(), x.clone())))
    assert last_report().decision == "hit"
    assert [(i, n) for i, n, _, _ in seen] == [(i, 8) for i in range(8)]
    for (_, _, denoised, x), wanted in zip(seen, expected, strict=True):
        assert denoised.shape == x.shape == SMALL and denoised.dtype == wanted.dtype
        assert psnr(denoised, wanted) > 15
