"""Where a block mask may come from, and what it does at a given density.

All sources are scores of pairs of blocks, of which each row keeps the same number, what the layout
always keeps first: at equal density by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carnator.connectivity import Layout, layout
from carnator.connectivity.layout import FRAME_WEIGHT
from carnator.connectivity.observe import block_scores
from carnator.demo import captions, host
from carnator.demo.captions import Caption
from carnator.demo.model import EmbeddedModel

# exact: the target's own exact attention, which no method has without computing it.
SOURCES = ("donor", "template", "random", "online", "radial", "exact")
Scores = list[Tensor]  # of every layer, [H, blocks, blocks]


def layout_for(model: EmbeddedModel, shape: Sequence[int]) -> Layout:
    """The layout of a model's self-attention at a latent shape, captions of the demo before it."""
    tokens = model.token_layout()
    assert tokens is not None
    before = captions.TEXT_TOKENS if tokens.text == "first" else 0
    return layout(tokens.grid(shape), before)


def kept(scores: Tensor, at: Layout, density: float) -> Tensor:
    """The mask bool [H, blocks, blocks] of the best-scored pairs: in each row as many as make the
    density, or as the layout always keeps, if those are more."""
    count = max(1, round(density * at.blocks))
    best = scores.masked_fill(at.always, torch.inf).topk(count, -1).indices
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    return mask | at.always


def over_tokens(mask: Tensor, at: Layout) -> Tensor:
    """A block mask as bool [H, N, N] over tokens as they lie."""
    block = torch.empty(at.tokens, dtype=torch.long)
    block[at.order] = torch.arange(at.tokens) // at.block
    return mask[:, block][:, :, block]


def exact_mass(q: Tensor, k: Tensor, at: Layout, scale: float) -> Tensor:
    """Mean attention mass [H, blocks, blocks] that rows of a block give to blocks, exactly, of
    q, k [H, N, D]; for few tokens."""
    share = torch.softmax(q @ k.transpose(1, 2) * scale, -1)[:, at.order][:, :, at.order]
    spare = at.blocks * at.block - at.tokens
    cells = F.pad(share, (0, spare, 0, spare)).unflatten(1, (at.blocks, -1))
    sums = cells.sum(2).unflatten(2, (at.blocks, -1)).sum(-1)
    return sums / sums.sum(-1, keepdim=True).clamp_min(1e-30)


def radial(at: Layout, heads: int) -> Tensor:
    """Scores by nearness in space and time, the same for all heads (arXiv:2506.19852)."""
    place = at.centres * torch.tensor([FRAME_WEIGHT, 1.0, 1.0])
    return -torch.cdist(place, place).expand(heads, -1, -1)


class Seen:
    """An attention override that shows each layer's q, k, v of the positive branch, and lets
    ``instead`` compute all branches; None leaves it dense."""

    def __init__(
        self,
        layers: int,
        show: Callable[[int, Tensor, Tensor, Tensor], object] | None = None,
        instead: Callable[[int, Tensor, Tensor, Tensor], Tensor | None] | None = None,
    ):
        self.layers, self.show, self.instead, self._calls = layers, show, instead, 0

    def __call__(
        self, function: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, **words: Any
    ) -> Tensor:
        layer, self._calls = self._calls % self.layers, self._calls + 1
        if self.show is not None:
            self.show(layer, q[0], k[0], v[0])
        made = None if self.instead is None else self.instead(layer, q, k, v)
        return function(q, k, v, heads, **words) if made is None else made


@dataclass(eq=False)
class Observed:
    """A dense run: latents before each evaluation, the final latent, and pooled scores of every
    layer at some evaluations."""

    before: list[Tensor]
    latent: Tensor
    scores: dict[int, Scores]


@torch.no_grad()
def run(
    model: EmbeddedModel,
    caption: Caption,
    seed: int,
    levels: Tensor,
    override: Callable[[int], Any],
) -> tuple[list[Tensor], Tensor]:
    """An Euler run at the trained guidance, ``override(i)`` for the i-th evaluation: the latents
    before each evaluation and the final one."""
    cond, uncond = captions.embed(caption)[None], captions.embed(None)[None]
    before: list[Tensor] = []

    def denoise(x: Tensor, sigma: float) -> Tensor:
        watch = override(len(before))
        before.append(x)
        positive, negative = model.branches(x, sigma, cond, uncond, None, watch)
        assert negative is not None
        return negative + (positive - negative) * host.CFG

    noise = host.seed_noise(seed, model.family.shape)
    return before, host.euler(denoise, noise, levels)


def observed(
    model: EmbeddedModel, caption: Caption, seed: int, levels: Tensor, steps: Sequence[int]
) -> Observed:
    """A dense run, its pooled scores kept at the evaluations ``steps``."""
    at = layout_for(model, model.family.shape)
    layers = len(steps_layers(model))
    found: dict[int, Scores] = {i: [] for i in steps}

    def override(i: int) -> Any:
        if i not in found:
            return None
        return Seen(
            layers,
            lambda _, q, k, v: found[i].append(block_scores(q, k, at, q.shape[-1] ** -0.5)),
        )

    before, latent = run(model, caption, seed, levels, override)
    return Observed(before, latent, found)


def steps_layers(model: EmbeddedModel) -> range:
    """The layers of self-attention of a model."""
    tokens = model.token_layout()
    assert tokens is not None
    return range(tokens.layers)


def template(runs: Sequence[Observed]) -> dict[int, Scores]:
    """The mean scores of several runs."""
    return {
        i: [torch.stack(layer).mean(0) for layer in zip(*(r.scores[i] for r in runs), strict=True)]
        for i in runs[0].scores
    }


def nearest_step(step: int, levels: Tensor, steps: Mapping[int, Any] | Sequence[int]) -> int:
    """Of the evaluations ``steps`` the one whose noise level is nearest."""
    return min(steps, key=lambda i: abs(float(levels[i] - levels[step])))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of q, k, v [B, H, N, D] under a mask over tokens [H, N, N]."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None])
