"""A Wan of real width and few layers, whose attention is local by construction.

No real checkpoint is at hand, and random weights attend nearly evenly, so that no mask of any
density would hold their attention. Here the biases of queries and keys are chosen such that the
rotary position embedding makes of them, for each axis, a bump of given width around a token's own
place, narrower in some heads than in others; the random weights add what depends on content. How
sparse attention may be is therefore an assumption of this model, not a finding. What is measured
is what the method makes of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from carnator.demo.model import EmbeddedModel
from carnator.demo.wan import WanConfig, WanTransformer

DIM, HEADS, FFN, LAYERS = 1536, 12, 8960, 2  # Wan 2.1 1.3B has 30 layers
GRID = (8, 32, 32)  # 8,192 tokens
# Height of the bumps in the logarithm of attention, and their widths in tokens, per axis: frames,
# rows, columns. Heads take their widths in between.
HEIGHT = (5.0, 8.0, 8.0)
NARROW, WIDE = (0.6, 1.5, 1.5), (1.2, 3.0, 3.0)
CONTENT = 0.7  # spread of what content adds to a query or key, against 1 as trained models have


def bump(axis: int, width: float, head_dim: int) -> Tensor:
    """Amplitudes [pairs of one axis] whose rotated product is a bump of height 1 and a width.

    The transform of a Gaussian is a Gaussian; frequencies of the embedding are equally spaced in
    their logarithm, so that each counts in proportion to itself.
    """
    side = 2 * (head_dim // 6)
    size = head_dim - 2 * side if axis == 0 else side
    frequency = 10000.0 ** -(torch.arange(0, size, 2) / size)
    weight = frequency * torch.exp(-((frequency * width) ** 2) / 2)
    return (weight / weight.sum()).sqrt()


def place_bias(heads: int, head_dim: int) -> Tensor:
    """The bias [heads * head_dim] of queries and of keys."""
    made = torch.zeros(heads, head_dim)
    for head in range(heads):
        share = head / max(1, heads - 1)
        pairs = [
            bump(axis, low + (high - low) * share, head_dim) * math.sqrt(height * head_dim**0.5)
            for axis, (low, high, height) in enumerate(zip(NARROW, WIDE, HEIGHT, strict=True))
        ]
        made[head, ::2] = torch.cat(pairs)  # of each pair that is turned together, one half
    return made.flatten()


def built(
    dim: int = DIM,
    heads: int = HEADS,
    ffn: int = FFN,
    layers: int = LAYERS,
    seed: int = 0,
    local: bool = True,
) -> EmbeddedModel:
    """The model, with random weights but for what makes its attention ``local``."""
    network = WanTransformer(WanConfig(dim=dim, ffn_dim=ffn, num_heads=heads, num_layers=layers))
    network.initialise(seed)
    bias = place_bias(heads, dim // heads)
    size = float((bias.square().mean() + CONTENT**2).sqrt())
    with torch.no_grad():
        nn.init.normal_(network.head.head.weight, std=0.02)
        for block in network.blocks if local else ():
            attention = block.self_attn
            for linear, norm in (
                (attention.q, attention.norm_q),
                (attention.k, attention.norm_k),
            ):
                linear.weight.mul_(CONTENT)
                linear.bias.copy_(bias)
                norm.weight.fill_(size)  # gives back what normalising takes away
    return EmbeddedModel(network, "wide Wan")


def latent_shape(grid: tuple[int, int, int] = GRID) -> tuple[int, int, int, int, int]:
    frames, rows, columns = grid
    return 1, 16, frames, 2 * rows, 2 * columns
