"""Carnator beside what graphs of real users hold: stages, split branches, other packs' nodes."""

from __future__ import annotations

import comfy.sample
import numpy as np
import pytest
import torch
from harness import part
from sampling import CAPTION, SEED, SMALL, TWEAK, caption, flush, last_report, loose, sample


def attach(model, store):
    return part("nodes.host").attach(model, loose(), store)


def two_stages(first, second, text=CAPTION, steps=10, switch=5):
    """Two KSamplerAdvanced nodes in a row, the first leaving its noise to the second."""
    latent = torch.zeros(SMALL)
    decisions = []
    for model, start, end, full in ((first, 0, switch, False), (second, switch, steps, True)):
        noise = comfy.sample.prepare_noise(latent, SEED) if start == 0 else torch.zeros(SMALL)
        latent = comfy.sample.sample(
            model,
            noise,
            steps,
            2.5,
            "euler",
            "simple",
            caption(text),
            caption(""),
            latent,
            disable_noise=start > 0,
            start_step=start,
            last_step=end,
            force_full_denoise=full,
            seed=SEED,
            disable_pbar=True,
        )
        decisions.append(last_report())
    return latent, decisions


def test_two_stages_with_two_models(small_model, other_model, store):
    expected, _ = two_stages(small_model, other_model)
    high, low = attach(small_model, store), attach(other_model, store)
    sample(high, steps=10)
    flush(store)
    got, reports = two_stages(high, low)
    assert torch.equal(got, expected)
    assert [r.decision for r in reports] == ["miss", "miss"]  # a whole run is no donor to a stage
    assert [r.dense_evaluations for r in reports] == [5, 5]
    flush(store)
    again, reports = two_stages(high, low)
    assert [r.decision for r in reports] == ["exact", "exact"]
    assert torch.equal(again, expected)
    _, reports = two_stages(high, low, TWEAK)
    assert reports[1].decision == "miss"  # it starts from another latent


def test_branches_run_apart_are_observed_alike(small_model, store, tmp_path, monkeypatch):
    """The host joins or splits the branches by free memory; records must not depend on it."""
    apart = part("nodes.host").StoreChoice(tmp_path / "apart", 2**30)
    sample(attach(small_model, store))
    flush(store)
    calls = []
    original = type(small_model.model).apply_model

    def counted(self, x, *args, **kwargs):
        calls.append(len(x))
        return original(self, x, *args, **kwargs)

    monkeypatch.setattr(type(small_model.model), "apply_model", counted)
    monkeypatch.setattr(small_model.model, "memory_required", lambda *args, **kwargs: 1e18)
    sample(attach(small_model, apart))
    flush(apart)
    assert set(calls) == {1}, "the branches were joined after all"
    (one,), (other,) = store.open().entries(), apart.open().entries()
    assert one.partition == other.partition and one.identity == other.identity
    assert one.signature.shape == other.signature.shape
    assert np.allclose(one.signature, other.signature, atol=2e-2, rtol=1e-2)
    assert other.meta["branched"]


@pytest.mark.parametrize("cfg", [1.0, 2.5])
def test_cfg_override_in_the_chain(small_model, store, cfg):
    nodes = pytest.importorskip("comfy_extras.nodes_custom_sampler")
    if not hasattr(nodes, "CFGOverride"):
        pytest.skip("this host has no CFGOverride")
    model = nodes.CFGOverride.execute(small_model, 4.0, 0.5, 1.0)[0]
    expected = sample(model, cfg=cfg)
    assert torch.equal(sample(attach(model, store), cfg=cfg), expected)
    flush(store)
    assert torch.equal(sample(attach(model, store), cfg=cfg), expected)
    assert last_report().decision == "exact"
    sample(attach(small_model, store), cfg=cfg)
    assert last_report().decision == "miss"


def test_extra_calls_after_guidance_are_not_runs_of_their_own(small_model, store):
    """Perturbed-attention and skip-layer guidance call the model again inside an evaluation."""
    import comfy.samplers

    def again(args):
        (weak,) = comfy.samplers.calc_cond_batch(
            args["model"], [args["cond"]], args["input"] * 0.9, args["sigma"], args["model_options"]
        )
        return args["denoised"] + 0.3 * (args["cond_denoised"] - weak)

    model = small_model.clone()
    model.set_model_sampler_post_cfg_function(again)
    expected = sample(model)
    assert torch.equal(sample(attach(model, store)), expected)
    flush(store)
    sample(attach(model, store), TWEAK)
    report = last_report()
    assert report.decision == "hit" and report.evaluations < report.dense_evaluations == 8


def test_inpainting_is_its_own_kind(small_model, store):
    start = torch.randn(SMALL, generator=torch.Generator().manual_seed(3))
    mask = torch.zeros(1, 1, 8, 8)
    mask[..., 4:] = 1.0

    def inpaint(model, text=CAPTION):
        noise = comfy.sample.prepare_noise(start, SEED)
        return comfy.sample.sample(
            model,
            noise,
            8,
            2.5,
            "euler",
            "simple",
            caption(text),
            caption(""),
            start,
            noise_mask=mask,
            seed=SEED,
            disable_pbar=True,
        )

    sample(attach(small_model, store), latent=start)
    flush(store)
    assert torch.equal(inpaint(attach(small_model, store)), inpaint(small_model))
    assert last_report().decision == "miss"
    flush(store)
    inpaint(attach(small_model, store), TWEAK)
    assert last_report().decision == "hit"


def test_the_store_may_vanish_while_the_host_runs(small_model, store):
    import shutil

    ours = attach(small_model, store)
    sample(ours)
    flush(store)
    shutil.rmtree(store.folder)
    assert torch.equal(sample(ours, TWEAK), sample(small_model, TWEAK))
    flush(store)
    assert torch.isfinite(sample(ours, TWEAK)).all()


def test_an_error_in_the_model_is_the_models_own(small_model, store):
    """Out of memory and the like pass through unchanged; the next run is right."""
    model = small_model.clone()
    calls = []

    def failing(args):
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("out of memory")
        return args["denoised"]

    model.set_model_sampler_post_cfg_function(failing)
    ours = attach(model, store)
    with pytest.raises(torch.OutOfMemoryError):
        sample(ours)
    flush(store)
    assert store.open().entries() == []
    assert torch.equal(sample(ours), sample(small_model))
