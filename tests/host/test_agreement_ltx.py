"""The embedded LTX-Video and the host's own are one and the same function of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import part
from sampling import CAPTION, caption
from torch import Tensor

DEMO = (1, 128, 2, 8, 8)
ODD = (2, 128, 3, 4, 6)  # all three axes differ, and there is a batch
SIZES: dict[str, dict] = {
    "demo": {},
    # Other heads, a pair that does not turn, latents that cover fewer pixels.
    "other": {"dim": 104, "num_heads": 4, "num_layers": 2, "scale": (2, 4, 4)},
}


@pytest.fixture(scope="module", params=SIZES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The embedded network with random weights, and the host's patcher of the same file."""
    import comfy.model_management
    import comfy.sd

    ltx, train = part("carnator.demo.ltx"), part("carnator.demo.train")
    network = ltx.LTXTransformer(ltx.LTXConfig(**SIZES[request.param])).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for p in network.parameters():  # nothing at one or zero, or a missed weight would not show
        p.normal_(0, 0.05 if p.ndim == 1 else p.shape[1] ** -0.5, generator=generator)
        p.add_(float(p.ndim == 1))
    path = tmp_path_factory.mktemp("ltx") / "random.safetensors"
    train.save_model(path, network.state_dict(), network.config)
    patcher = comfy.sd.load_diffusion_model(str(path))
    comfy.model_management.load_models_gpu([patcher])
    return network, patcher


def prompt(text: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The text tokens, and the mask that the host asks for with them: all of them count."""
    context = caption(text)[0][0].expand(shape[0], -1, -1)
    return context, torch.ones(context.shape[:2], dtype=torch.long)


def test_the_host_takes_the_file_for_ltx_video_with_every_tensor_used(pair):
    import comfy.model_base

    network, patcher = pair
    assert type(patcher.model) is comfy.model_base.LTXV
    theirs = patcher.model.diffusion_model.state_dict()
    ours = network.state_dict()
    assert {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in ours.items()}
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())


@pytest.mark.parametrize("shape", [DEMO, ODD])
@pytest.mark.parametrize("text", [CAPTION, ""])
def test_one_forward_agrees(pair, shape, text):
    network, patcher = pair
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    context, mask = prompt(text, shape)
    for sigma in (1.0, 0.6, 0.05):
        levels = torch.full((shape[0],), sigma)  # this host model scales them to 0..1000 itself
        ours = network(x, levels, context)
        theirs = patcher.model.diffusion_model(x, levels, context, mask)
        assert ours.std() > 0.1
        assert (ours - theirs).abs().max() < 1e-5


def test_the_denoised_latent_agrees(pair):
    """Through the host's own parametrisation, with another noise level for each of a batch."""
    network, patcher = pair
    x = torch.randn(ODD, generator=torch.Generator().manual_seed(1))
    context, mask = prompt(CAPTION, ODD)
    sigma = torch.tensor([0.7, 0.2])
    theirs = patcher.model.apply_model(x, sigma, c_crossattn=context, attention_mask=mask)
    ours = x - sigma.view(-1, 1, 1, 1, 1) * network(x, sigma, context)
    assert (ours - theirs).abs().max() < 1e-5


def test_observed_attention_is_what_the_host_computes(pair):
    """Layer by layer: queries, keys and values that go in, and what comes out."""
    network, patcher = pair
    seen: list[tuple] = []

    def override(attend: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = attend(*args, **kwargs)
        seen.append((*args[:3], out))
        return out

    x = torch.randn(ODD, generator=torch.Generator().manual_seed(2))
    context, mask = prompt(CAPTION, ODD)
    levels = torch.full((ODD[0],), 0.5)
    options = {"optimized_attention_override": override}
    patcher.model.diffusion_model(x, levels, context, mask, transformer_options=options)
    observed: list[tuple] = []
    network(x, levels, context, lambda *layer: observed.append(layer))
    assert [layer for layer, *_ in observed] == list(range(network.config.num_layers))
    for (_, q, k, v, out), theirs in zip(observed, seen[::2], strict=True):  # cross in between
        merged = (*(a.transpose(1, 2).flatten(2) for a in (q, k, v)), out)  # heads side by side
        for a, b in zip(merged, theirs, strict=True):
            assert a.shape == b.shape
            assert (a - b).abs().max() < 1e-4
