"""The four pipeline nodes: a drop-in for SamplerCustomAdvanced whose probe is not made twice."""

from __future__ import annotations

import comfy.samplers
import pytest
import torch
from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced
from harness import part
from sampling import TWEAK, Calls, advanced, empty, flush, guider, last_report, sample


def pipeline(model, store, text=TWEAK, sampler="euler", preset="custom", budget=10.0):
    """The four nodes in a row: latents, report of the sampler, match, report of the match."""
    nodes = part("nodes.pipeline")
    noise, method, sigmas = advanced(sampler, model=model)
    five = (noise, guider(model, text), method, sigmas, empty())
    probe = nodes.CarnatorProbe.execute(*five)[0]
    match, accepted, told = nodes.CarnatorSignatureMatch.execute(
        probe, preset, budget, store=store
    ).args
    scope, preview = nodes.CarnatorReuseScope.execute(match).args
    assert preview.ndim == 4 and preview.shape[-1] == 3
    latent, denoised, report = nodes.CarnatorSparseAttentionSampler.execute(*five, scope).args
    assert accepted == report.decision.startswith(("hit", "exact"))
    assert told.decision == report.decision
    return latent["samples"], denoised["samples"], report


@pytest.fixture(autouse=True)
def previews_in_a_temporary_folder(tmp_path, monkeypatch):
    import folder_paths

    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_2m", "euler_ancestral"])
def test_a_miss_is_the_plain_sampler(small_model, store, sampler):
    counted = Calls(small_model)
    noise, method, sigmas = advanced(sampler, model=small_model)
    plain = SamplerCustomAdvanced.execute(
        noise, guider(counted.model, TWEAK), method, sigmas, empty()
    )
    dense, counted.count = counted.count, 0
    latent, denoised, report = pipeline(counted.model, store, sampler=sampler)
    assert report.decision in ("miss", "dense")
    assert torch.equal(latent, plain[0]["samples"])
    assert torch.equal(denoised, plain[1]["samples"])
    assert counted.count == dense  # the probe's evaluation included


def test_a_hit_is_the_one_node_way_with_one_probe(small_model, store):
    host, settings = part("nodes.host"), part("carnator.request").Settings("custom", 10.0)
    counted = Calls(small_model)
    pipeline(counted.model, store, text="red circle left on gray")
    flush(store)
    counted.count = 0
    latent, _, report = pipeline(counted.model, store)
    assert report.decision == "hit"
    assert counted.count == report.evaluations < report.dense_evaluations
    one_node = sample(host.attach(counted.model, settings, store), TWEAK)
    assert torch.equal(latent, one_node)


def test_without_a_scope_it_is_the_plain_sampler(small_model, store):
    node = part("nodes.pipeline").CarnatorSparseAttentionSampler
    noise, method, sigmas = advanced(model=small_model)
    plain = SamplerCustomAdvanced.execute(noise, guider(small_model), method, sigmas, empty())
    ours = node.execute(noise, guider(small_model), method, sigmas, empty())
    assert torch.equal(ours[0]["samples"], plain[0]["samples"])
    assert ours[2].decision == "dense" and ours[2].evaluations == 8
    model = part("nodes.host").attach(small_model, part("carnator.request").Settings(), store)
    ours = node.execute(noise, guider(model), method, sigmas, empty())
    assert ours[2].decision == "miss"  # the model's own Accelerate was at work


def test_guiders_of_other_kinds_go_through(small_model, store):
    from comfy_extras.nodes_custom_sampler import Guider_Basic, Guider_DualCFG
    from sampling import CAPTION, caption

    basic = Guider_Basic(small_model)
    basic.set_conds(caption(TWEAK))
    dual = Guider_DualCFG(small_model)
    dual.set_conds(caption(TWEAK), caption(CAPTION), caption(""))
    dual.set_cfg(2.0, 1.5)
    noise, method, sigmas = advanced(model=small_model)
    for made in (basic, dual):
        plain = SamplerCustomAdvanced.execute(noise, made, method, sigmas, empty())
        twin = type(made)(
            part("nodes.host").attach(
                small_model, part("carnator.request").Settings("custom", 10.0), store
            )
        )
        twin.__dict__.update(
            {k: v for k, v in vars(made).items() if k not in ("model_patcher", "model_options")}
        )
        ours = SamplerCustomAdvanced.execute(noise, twin, method, sigmas, empty())
        assert torch.equal(ours[0]["samples"], plain[0]["samples"])
        flush(store)
        again = SamplerCustomAdvanced.execute(noise, twin, method, sigmas, empty())
        assert last_report().decision == "exact"
        assert torch.equal(again[0]["samples"], plain[0]["samples"])


def mismatch(model, store, other=None, **changed):
    """Hand the scope of one run to the sampler of another."""
    nodes = part("nodes.pipeline")
    noise, method, sigmas = advanced(model=model)
    given = dict(
        noise=noise, guider=guider(model), sampler=method, sigmas=sigmas, latent_image=empty()
    )
    probe = nodes.CarnatorProbe.execute(**given)[0]
    scope = nodes.CarnatorSignatureMatch.execute(probe, "balanced", store=store)[0]
    return nodes.CarnatorSparseAttentionSampler.execute(**{**given, **changed}, scope=scope)


def test_a_probe_of_another_run_is_refused(small_model, other_model, store):
    noise, _, _ = advanced(seed=8, model=small_model)
    _, heun, sigmas = advanced("heun", steps=9, model=small_model)
    for words, changed in (
        ("noise", {"noise": noise}),
        ("latent", {"latent_image": empty((1, 16, 1, 8, 8))}),
        ("prompt", {"guider": guider(small_model, TWEAK)}),
        ("cfg", {"guider": guider(small_model, cfg=3.0)}),
        ("weights", {"guider": guider(other_model)}),
        ("sampler", {"sampler": heun}),
        ("schedule", {"sigmas": sigmas}),
    ):
        with pytest.raises(ValueError, match=f"belongs to another run: .*{words}.* differ"):
            mismatch(small_model, store, **changed)
    assert torch.equal(mismatch(small_model, store)[0]["samples"], sample(small_model))


def test_what_cannot_be_probed_runs_dense(small_model, store):
    batch = {"samples": torch.zeros(2, 16, 4, 8, 8)}
    result = mismatch(small_model, store, latent_image=batch)
    assert result[2].decision == "dense"


def test_a_report_belongs_to_its_latent(small_model, store):
    host, settings = part("nodes.host"), part("carnator.request").Settings()
    reports, node = part("nodes.reports"), part("nodes.report").CarnatorReport
    first = sample(host.attach(small_model, settings, store))
    flush(store)
    sample(host.attach(small_model, settings, store), steps=5)
    assert reports.find(first).dense_evaluations == 8
    result = node.execute({"samples": first})
    assert result[0]["samples"] is first and "8 of 8" in result[1]
    assert result.ui["carnator"][0]["decision"] == "miss"
    assert node.execute(None)[1]
    assert comfy.samplers  # the host's module, not a stub


def test_rounding_is_not_shown_as_a_departure():
    match, agreement = part("carnator.matching").Match, part("nodes.pipeline").agreement
    energy, noise = 2.0, torch.rand(4, 8, 8)
    faint = match(None, "exact", "", d0_map=noise * 1e-6, d0=1e-6 * float(noise.mean()) / energy)
    assert agreement(faint).min() > 0.99
    far = match(None, "hit", "", d0_map=noise, d0=float(noise.mean()) / energy)
    assert agreement(far).min() == 0 and agreement(far).max() > 0.9
    assert agreement(match(None, "miss", "")) is None
