"""A stored clip is served for a repeated request alone, not for one that merely begins alike."""

from __future__ import annotations

import comfy.samplers
import pytest
import torch
from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced
from harness import part
from safetensors.torch import save_file
from sampling import CAPTION, advanced, caption, empty, flush, guider, last_report, sample
from trial import attach

STEPS = 8


class ListGuider(comfy.samplers.CFGGuider):
    """A guidance scale for every step, as a pack might have it."""

    def __init__(self, model, scales):
        super().__init__(model)
        self.scales = scales

    def predict_noise(self, x, timestep, model_options=None, seed=None):
        model_options = model_options or {}
        sigmas = model_options["transformer_options"]["sample_sigmas"]
        self.cfg = self.scales[int((sigmas - timestep[0]).abs().argmin())]
        return super().predict_noise(x, timestep, model_options, seed)


def guided(model, scales):
    made = ListGuider(model, scales)
    made.set_conds(caption(CAPTION), caption(""))
    made.set_cfg(scales[0])
    noise, sampler, sigmas = advanced("euler", STEPS, model=made.model_patcher)
    return SamplerCustomAdvanced.execute(noise, made, sampler, sigmas, empty())[0]["samples"]


def test_settings_of_a_guider_that_act_later_are_another_request(demo_model, store):
    model = attach(demo_model, store)
    scales = [2.5] * (STEPS + 1)
    guided(model, scales)
    flush(store)
    guided(model, [2.5, 2.5, *[6.0] * (STEPS - 1)])
    assert last_report().decision != "exact"


@pytest.mark.parametrize("strength", [0.9, 0.5])
def test_a_lora_in_bypass_mode_of_another_strength_is_another_request(
    registry, demo_model, store, monkeypatch, tmp_path, strength
):
    import folder_paths

    if "LoraLoaderBypassModelOnly" not in registry:
        pytest.skip("this host has no LoraLoaderBypassModelOnly")
    places = ([str(tmp_path)], {".safetensors"})
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "loras", places)
    rows, columns = demo_model.model.diffusion_model.blocks[0].ffn[0].weight.shape
    draw = torch.Generator().manual_seed(1)
    name = "diffusion_model.blocks.0.ffn.0"
    up, down = torch.randn(rows, 2, generator=draw), torch.randn(2, columns, generator=draw)
    parts = {f"{name}.lora_up.weight": 0.1 * up, f"{name}.lora_down.weight": 0.1 * down}
    save_file(parts, tmp_path / "one.safetensors")

    def patched(value):
        node = registry["LoraLoaderBypassModelOnly"]()
        work = getattr(node, node.FUNCTION)
        return work(model=demo_model, lora_name="one.safetensors", strength_model=value)[0]

    sample(attach(patched(1.0), store), cfg=7.0)
    flush(store)
    sample(attach(patched(strength), store), cfg=7.0)
    assert last_report().decision != "exact"


def test_a_probe_is_not_used_where_an_option_has_changed_since(demo_model, store):
    nodes = part("nodes.pipeline")

    def optional(factor):
        model = demo_model.clone()
        model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * factor)
        return model

    def inputs(model):
        noise, sampler, sigmas = advanced("euler", STEPS, model=model)
        return noise, guider(model), sampler, sigmas, empty()

    first, then = optional(1.0), optional(0.8)
    probe = nodes.CarnatorProbe.execute(*inputs(first)).args[0]
    verdict = nodes.CarnatorSignatureMatch.execute(probe, "balanced", store=store).args[0]
    got = nodes.CarnatorSparseAttentionSampler.execute(*inputs(then), scope=verdict).args[0]
    want = SamplerCustomAdvanced.execute(*inputs(then))[0]
    assert torch.equal(got["samples"], want["samples"])
