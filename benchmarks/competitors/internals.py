"""The parts of a backbone that TeaCache looks into: first modulation and stack of blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carnator.demo.hunyuan import pooled_text
from carnator.demo.ltx import modulated_rms
from carnator.demo.model import EmbeddedModel
from carnator.demo.wan import TIMESTEPS, modulated_norm, timestep_features

Signal = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Anatomy:
    """``stacks`` names the lists of blocks in their order. ``signal`` is what a step is judged by,
    from the network, latents x [B, ...], sigma [B] and text [B, L, D]: any tensor [B, ...]."""

    stacks: tuple[str, ...]
    signal: Signal


def wan_signal(net: Any, _x: Tensor, sigma: Tensor, _text: Tensor) -> Tensor:
    """Wan's time embedding as it is projected for the blocks: all that TeaCache's Wan port looks
    at, so that its steps depend on the schedule alone."""
    return net.time_projection(net.time_embedding(timestep_features(sigma * TIMESTEPS)))


def hunyuan_signal(net: Any, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """The modulated video tokens that enter the first double block's attention."""
    img = net.img_in["proj"](x).flatten(2).transpose(1, 2)
    time = net.time_in(timestep_features(sigma * TIMESTEPS))
    vector = F.silu(time + net.vector_in(pooled_text(text)))
    return modulated_norm(img, *net.double_blocks[0].img_mod(vector)[:2])


def ltx_signal(net: Any, x: Tensor, sigma: Tensor, _text: Tensor) -> Tensor:
    """The modulated tokens that enter the first block's self-attention."""
    h = net.patchify_proj(x.flatten(2).transpose(1, 2))
    modulation = net.adaln_single(sigma)[1] + net.transformer_blocks[0].scale_shift_table
    return modulated_rms(h, *modulation.chunk(6, 1)[:2])


ANATOMY = {
    "wan": Anatomy(("blocks",), wan_signal),
    "hunyuan": Anatomy(("double_blocks", "single_blocks"), hunyuan_signal),
    "ltx": Anatomy(("transformer_blocks",), ltx_signal),
}


def anatomy(model: EmbeddedModel) -> Anatomy:
    return ANATOMY[model.family.name]


def signal(model: EmbeddedModel, x: Tensor, sigma: float, text: Tensor) -> Tensor:
    """What a step at latents x [B, ...] is judged by, flattened to [B, K]."""
    levels = x.new_full((len(x),), sigma)
    return anatomy(model).signal(model.network, x, levels, text).flatten(1)


class Stack:
    """Watches what a model's blocks add to the video tokens, while it is entered."""

    def __init__(self, model: EmbeddedModel):
        stacks = [getattr(model.network, name) for name in anatomy(model).stacks]
        self.first, self.last = stacks[0][0], stacks[-1][-1]
        self.before, self.after = torch.zeros(0), torch.zeros(0)

    def __enter__(self) -> Stack:
        self._handles = [
            self.first.register_forward_pre_hook(self._enter),
            self.last.register_forward_hook(self._leave),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.before = inputs[0]

    def _leave(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.after = output

    @property
    def residual(self) -> Tensor:
        """What was added [B, N, C]; text tokens stand before the video's where they are joined."""
        return self.after[:, -self.before.shape[1] :] - self.before


class StandIn(nn.Module):
    """Stands in for a block: adds a residual to the video tokens, or nothing. A double-stream
    block (``two``) hands on the text tokens beside them."""

    def __init__(self, residual: Tensor | None, two: bool):
        super().__init__()
        self.residual, self.two = residual, two

    def forward(self, h: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out = h if self.residual is None else h + self.residual
        return (out, rest[0]) if self.two else out


def shortened(model: EmbeddedModel, residual: Tensor) -> EmbeddedModel:
    """The model with all its blocks replaced by the addition of ``residual`` [B, N, C]; it shares
    every other weight, and the model itself stays as it is."""
    net = copy.copy(model.network)
    net._modules = dict(net._modules)
    added: Tensor | None = residual
    for name in anatomy(model).stacks:
        blocks = []
        for _ in getattr(model.network, name):
            blocks.append(StandIn(added, name == "double_blocks"))
            added = None
        setattr(net, name, nn.ModuleList(blocks))
    out = copy.copy(model)
    out.network = net
    return out
