"""A few small frames of a clip, made from its latent alone: no decoder, no host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

PREVIEW = "preview"  # name of the tensor in a record
FRAMES = 8
SIDE = 64  # pixels at most
RANGE = 2.5  # standard deviations from mid grey to black or white
MOST_FRAMES, MOST_SIDE = 64, 512  # what is shown of somebody else's record


@torch.no_grad()
def make_preview(latent: Tensor, factors: Sequence[Sequence[float]] | None = None) -> Tensor:
    """Frames uint8 [f, h, w, 3] of a finite latent [1, C, F, H, W] or [1, C, H, W]: up to FRAMES
    of them, the longer side up to SIDE.

    ``factors`` [C, 3] take the latent's channels to red, green and blue in -1..1, where the host
    knows them. Without them the colours are false: the direction in which the channels vary most
    is shown as brightness, the next two as hue.
    """
    if latent.ndim == 4:
        latent = latent[:, :, None]
    frames, height, width = latent.shape[2:]
    scale = min(1.0, SIDE / max(height, width))
    size = (round(height * scale) or 1, round(width * scale) or 1)
    chosen = torch.linspace(0, frames - 1, min(frames, FRAMES)).round().long()
    small = F.adaptive_avg_pool2d(latent[0][:, chosen.to(latent.device)].float(), size).cpu()
    channels = small.flatten(1)  # [C, f * h * w]
    if factors is not None:
        colors = 0.5 + 0.5 * torch.tensor(factors, dtype=torch.float32).T @ channels
    else:
        colors = _false_colors(channels)
    shape = (3, len(chosen), *size)
    shown = (255 * colors.clamp(0, 1)).round().to(torch.uint8).view(shape)
    return shown.permute(1, 2, 3, 0).contiguous()


def _false_colors(channels: Tensor) -> Tensor:
    """Red, green and blue [3, N] in 0..1 from the principal components of channels [C, N]."""
    centered = channels - channels.mean(1, keepdim=True)
    # In double: a channel may be thousands of times as strong as the others.
    variances, axes = torch.linalg.eigh((centered @ centered.T).double() / channels.shape[1])
    axes = axes.flip(1)[:, :3].float()  # strongest first
    strongest = axes.abs().argmax(0)
    axes = axes * axes[strongest, torch.arange(axes.shape[1])].sign()  # the same on every machine
    parts = F.pad((axes.T @ centered), (0, 0, 0, 3 - axes.shape[1]))
    light, blue, red = parts / (2 * RANGE * float(variances[-1].clamp_min(1e-20)) ** 0.5)
    # Weights of ITU-R BT.601: light = 0.299 R + 0.587 G + 0.114 B.
    colors = (light + 1.402 * red, light - 0.344 * blue - 0.714 * red, light + 1.772 * blue)
    return 0.5 + torch.stack(colors)


def picture(frames: Tensor) -> np.ndarray | None:
    """The frames [f, h, w, 3] of a record, or None if that is not what they are."""
    shape = frames.shape
    if frames.dtype != torch.uint8 or frames.ndim != 4 or shape[3] != 3 or 0 in shape:
        return None
    if shape[0] > MOST_FRAMES or max(shape[1:3]) > MOST_SIDE:
        return None
    return frames.numpy()
