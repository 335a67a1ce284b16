"""Clips of moving shapes, rendered exactly, and the fold that turns them into latents."""

from __future__ import annotations

import random

import torch
from einops import rearrange
from torch import Tensor

from .captions import BACKGROUNDS, COLORS, Caption, random_caption

FRAMES, SIZE = 4, 32
Fold = tuple[int, int, int]  # frames, rows and columns that become channels of one place
FOLD: Fold = (1, 2, 2)  # 3 colours x 2 x 2 = 12 live latent channels
LIVE_CHANNELS = 3 * FOLD[0] * FOLD[1] * FOLD[2]
CHANNELS = 16  # Wan's and HunyuanVideo's latent channel count; the last four stay zero
SPEED = 2.5  # pixels a frame

# Float palette in [-1, 1]: an integer one would truncate the anti-aliased edges.
PALETTE = torch.tensor(
    [
        (1.0, -0.8, -0.8),
        (-0.8, 0.8, -0.8),
        (-0.8, -0.6, 1.0),
        (1.0, 0.9, -0.8),
        (1.0, -0.8, 1.0),
        (-0.8, 0.9, 1.0),
    ]
)
BACKGROUND_PALETTE = torch.tensor([(-1.0,) * 3, (0.0,) * 3, (0.9,) * 3])
DIRECTION = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}

ROWS, COLUMNS = torch.meshgrid(
    torch.arange(SIZE, dtype=torch.float32), torch.arange(SIZE, dtype=torch.float32), indexing="ij"
)


def shape_mask(shape: str, x: Tensor, y: Tensor, radius: Tensor | float) -> Tensor:
    """Anti-aliased coverage [F, 32, 32] in 0..1 of a shape centred at x, y [F] (pixels)."""
    dx, dy = COLUMNS - x[:, None, None], ROWS - y[:, None, None]
    if shape == "circle":
        distance = torch.hypot(dx, dy) - radius
    elif shape == "square":
        distance = torch.maximum(dx.abs(), dy.abs()) - 0.88 * radius
    elif shape == "triangle":
        slope = (dx.abs() * 3**0.5 - dy - 1.2 * radius) / 2
        distance = torch.maximum(dy - 0.8 * radius, slope)
    else:
        raise ValueError(f"Unknown shape {shape!r}.")
    return (0.5 - distance).clamp(0, 1)


def render(caption: Caption, rng: random.Random) -> Tensor:
    """A clip [3, 4, 32, 32] in [-1, 1] that shows the caption; place and size are random.

    The first of two things is on the left, the second on the right.
    """
    background = BACKGROUND_PALETTE[BACKGROUNDS.index(caption.background)]
    clip = background.view(3, 1, 1, 1).expand(3, FRAMES, SIZE, SIZE)
    time = torch.arange(FRAMES) - (FRAMES - 1) / 2
    for i, thing in enumerate(caption.things):
        if len(caption.things) == 1:
            radius, x = rng.uniform(5.0, 7.0), rng.uniform(11, 21)
        else:
            radius, x = rng.uniform(4.5, 6.0), (9, 21)[i] + rng.uniform(0, 2)
        y = rng.uniform(11, 21)
        dx, dy = DIRECTION[thing.motion]
        mask = shape_mask(thing.shape, x + dx * SPEED * time, y + dy * SPEED * time, radius)
        color = PALETTE[COLORS.index(thing.color)].view(3, 1, 1, 1)
        clip = clip * (1 - mask) + color * mask
    return clip


def live_channels(fold: Fold = FOLD) -> int:
    """How many channels of a latent hold pixels: three colours of every folded place."""
    return 3 * fold[0] * fold[1] * fold[2]


def to_latent(clip: Tensor, fold: Fold = FOLD, channels: int = CHANNELS) -> Tensor:
    """Fold clips [..., 3, F, H, W] into latents [..., channels, F/t, H/a, W/b]; invertible.

    The channels beyond the folded pixels are zero. Raises ValueError when they are too few.
    """
    t, a, b = fold
    spare = channels - live_channels(fold)
    if spare < 0:
        raise ValueError(f"A fold of {fold} needs {live_channels(fold)} channels, not {channels}.")
    folded = rearrange(clip, "... c (f t) (h a) (w b) -> ... (c t a b) f h w", t=t, a=a, b=b)
    pad = folded.new_zeros(*folded.shape[:-4], spare, *folded.shape[-3:])
    return torch.cat([folded, pad], dim=-4)


def to_clip(latent: Tensor, fold: Fold = FOLD) -> Tensor:
    """Unfold latents [..., C, f, h, w] into clips [..., 3, f t, h a, w b], clamped to [-1, 1]."""
    t, a, b = fold
    live = latent[..., : live_channels(fold), :, :, :]
    clip = rearrange(live, "... (c t a b) f h w -> ... c (f t) (h a) (w b)", t=t, a=a, b=b)
    return clip.clamp(-1, 1)


def training_pair(rng: random.Random) -> tuple[Caption, Tensor]:
    """A caption that is not held out, and a clip [3, 4, 32, 32] that shows it."""
    while (caption := random_caption(rng)).held_out:
        pass
    return caption, render(caption, rng)
