"""The embedded HunyuanVideo and the host's own are one and the same function of a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from harness import part
from safetensors.torch import save_file
from sampling import CAPTION, SHAPE, caption

ODD = (2, 16, 3, 6, 10)  # all three axes differ, and there is a batch


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The embedded network with random weights, and the host's patcher of the same file."""
    import comfy.model_management
    import comfy.sd

    hunyuan = part("carnator.demo.hunyuan")
    network = hunyuan.HunyuanTransformer(hunyuan.HunyuanConfig()).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for p in network.parameters():  # nothing at one or zero, or a missed weight would not show
        p.normal_(0, 0.02 if p.ndim == 1 else p[0].numel() ** -0.5, generator=generator)
        p.add_(float(p.ndim == 1))
    network.final_layer.linear.weight.mul_(0.25)  # a velocity of about unit variance
    path = tmp_path_factory.mktemp("hunyuan") / "random.safetensors"
    metadata = {"config": json.dumps(network.config.host_config())}
    save_file({k: v.contiguous() for k, v in network.state_dict().items()}, path, metadata)
    patcher = comfy.sd.load_diffusion_model(str(path))
    comfy.model_management.load_models_gpu([patcher])
    return network, patcher


def test_the_host_takes_the_file_for_hunyuan_video_with_every_tensor_used(pair):
    import comfy.model_base

    network, patcher = pair
    assert type(patcher.model) is comfy.model_base.HunyuanVideo
    theirs = patcher.model.diffusion_model.state_dict()
    ours = network.state_dict()
    assert {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in ours.items()}
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())


@pytest.mark.parametrize("shape", [SHAPE, ODD])
@pytest.mark.parametrize("text", [CAPTION, ""])
def test_one_forward_agrees(pair, shape, text):
    network, patcher = pair
    pooled_text = part("carnator.demo.hunyuan").pooled_text
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    context = caption(text)[0][0].expand(shape[0], -1, -1)
    for sigma in (1.0, 0.6, 0.05):
        levels = torch.full((shape[0],), sigma)
        ours = network(x, levels, context)
        theirs = patcher.model.diffusion_model(
            x, levels * 1000, context=context, y=pooled_text(context)
        )
        assert 0.5 < ours.std() < 2
        assert (ours - theirs).abs().max() < 1e-5


def test_the_denoised_latent_agrees(pair):
    """Through the host's own parametrisation; its unused guidance of 6 must change nothing."""
    network, patcher = pair
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    context = caption(CAPTION)[0][0]
    sigma = torch.tensor([0.7])
    theirs = patcher.model.apply_model(
        x,
        sigma,
        c_crossattn=context,
        y=part("carnator.demo.hunyuan").pooled_text(context),
        guidance=torch.tensor([6.0]),
    )
    ours = x - 0.7 * network(x, sigma, context)
    assert (ours - theirs).abs().max() < 1e-5


def test_observed_attention_is_what_the_host_computes(pair):
    """Layer by layer: queries, keys and values that go in, and what comes out."""
    network, patcher = pair
    hunyuan = part("carnator.demo.hunyuan")
    seen: list[tuple] = []

    def override(attend: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = attend(*args, **kwargs)
        seen.append((*args[:3], out))
        return out

    x = torch.randn(ODD, generator=torch.Generator().manual_seed(2))
    context = caption(CAPTION)[0][0].expand(ODD[0], -1, -1)
    levels = torch.full((ODD[0],), 0.5)
    patcher.model.diffusion_model(
        x,
        levels * 1000,
        context=context,
        y=hunyuan.pooled_text(context),
        transformer_options={"optimized_attention_override": override},
    )
    joint = seen[part("carnator.demo.hunyuan_layers").REFINER_BLOCKS :]  # the refiner's come first
    observed: list[tuple] = []
    network(x, levels, context, lambda *layer: observed.append(layer))
    assert [layer for layer, *_ in observed] == list(range(len(joint)))
    for (_, *ours), theirs in zip(observed, joint, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            assert (a - b).abs().max() < 1e-4
