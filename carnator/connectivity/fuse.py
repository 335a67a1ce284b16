"""A donor's masks, widened by what the target has of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import Layout

# The scope map holds 1 where the donor is trusted. A token counts as the target's own below
# OWN, and a block as soon as it holds this share of such tokens.
OWN = 0.25
OWN_SHARE = 0.25
DENSE_LATE = 0.1  # share of all layers that stay dense among the last third


def target_blocks(
    weight: Tensor, layout: Layout, own: float = OWN, share: float = OWN_SHARE
) -> Tensor:
    """Bool [blocks]: which hold tokens of the target's own.

    ``weight`` is the scope map [B, 1, F, H, W] (or [B, 1, H, W]) at the latent's resolution; a
    token takes the mean over its patch and the least over the batch.
    """
    if weight.ndim == 4:
        weight = weight[:, :, None]
    pooled = F.adaptive_avg_pool3d(weight.detach().float().cpu(), layout.grid).amin((0, 1))
    values = layout.per_token(pooled)
    there = ~torch.isnan(values)
    count = there.sum(-1).clamp_min(1)
    return ((values < own) & there).sum(-1) >= (share * count).clamp_min(1)


def fuse(donor: Tensor, layout: Layout, target: Tensor | None = None) -> Tensor:
    """Masks bool [H, blocks, blocks]: a pair of blocks is kept if the donor has it, if either
    holds target-specific tokens (``target`` bool [blocks]), or if the layout always keeps it."""
    kept = donor | layout.always
    if target is not None:
        kept = kept | target[:, None] | target[None]
    return kept


def dense_layers(densities: Sequence[float], share: float = DENSE_LATE) -> frozenset[int]:
    """The layers that stay dense: the first, and the densest of the last third.

    ``densities`` are those of the layers' observed masks, 1 for a layer without.
    """
    layers = len(densities)
    late = range(layers - layers // 3, layers)
    count = min(len(late), max(1, round(share * layers)))
    densest = sorted(late, key=lambda i: -densities[i])[:count]
    return frozenset({0, *densest})
