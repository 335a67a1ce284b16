"""Attention with a known shape, for tests of connectivity."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from carnator.connectivity import Layer, Layout

GRID = (4, 8, 8)
LAYERS, HEADS, DIM = 6, 2, 16
SCALE = DIM**-0.5


def local_attention(
    at: Layout, sharpness: float = 40.0, heads: int = HEADS, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """q and k [H, N, D] whose attention decays with the distance on the grid: a random feature
    map of a Gaussian kernel. ``shift`` moves what is looked at along the columns."""
    axes = torch.meshgrid(*(torch.arange(n) / max(at.grid) for n in at.grid), indexing="ij")
    place = torch.stack(axes, -1).reshape(-1, 3)
    words = torch.rand(at.tokens - len(place), 3)
    place = torch.cat([words[: at.before], place, words[at.before :]])
    generator = torch.Generator().manual_seed(1)
    waves = torch.randn(DIM // 2, 3, generator=generator) * 3

    def features(x: Tensor) -> Tensor:
        return torch.cat([(x @ waves.T).cos(), (x @ waves.T).sin()], -1)

    moved = place + torch.tensor([0.0, 0.0, shift])
    strength = torch.linspace(1.0, 1.3, heads)[:, None, None] * sharpness / DIM**0.5
    return features(moved) * strength, features(place).expand(heads, -1, -1)


def exact_map(q: Tensor, k: Tensor, at: Layout) -> Tensor:
    """Attention mass [H, blocks, blocks], by the definition."""
    share = torch.softmax(q @ k.transpose(1, 2) * SCALE, -1)[:, at.order][:, :, at.order]
    spare = at.blocks * at.block - at.tokens
    columns = F.pad(share, (0, spare)).unflatten(-1, (at.blocks, -1)).sum(-1)
    rows = F.pad(columns, (0, 0, 0, spare)).unflatten(1, (at.blocks, -1)).sum(2)
    return rows / rows.sum(-1, keepdim=True)


def some_layer(at: Layout, seed: int, density: float = 0.3) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(HEADS, at.blocks, at.blocks, generator=generator) < density
    return Layer(mask | at.always, torch.rand(HEADS, generator=generator) < 0.7)
