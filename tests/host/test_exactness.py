"""A stored clip is served for a repeated request alone, not for one that merely begins alike."""

from __future__ import annotations

import comfy.samplers
import pytest
import torch
from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced
from safetensors.torch import save_file
from sampling import CAPTION, advanced, caption, empty, flush, last_report, sample
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
    guider = ListGuider(model, scales)
    guider.set_conds(caption(CAPTION), caption(""))
    guider.set_cfg(scales[0])
    noise, sampler, sigmas = advanced("euler", STEPS, model=guider.model_patcher)
    return SamplerCustomAdvanced.execute(noise, guider, sampler, sigmas, empty())[0]["samples"]


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
