"""Does a clip show what its caption asks? Exact checks by colour, position and outline."""

from __future__ import annotations

import torch
from torch import Tensor

from .captions import BACKGROUNDS, COLORS, SHAPES, Caption
from .clips import BACKGROUND_PALETTE, COLUMNS, PALETTE, ROWS, SPEED, shape_mask

NEAR = 0.5  # squared RGB distance below which a pixel counts as a palette colour
BLOB, OUTLINE = 0.35, 0.6  # overlap with an outline that makes a thing, and a shape
SMALLEST, LARGEST = 20, 220  # pixels a thing may cover
AREA = {"circle": 3.1416, "square": 3.0976, "triangle": 2.3094}  # of radius 1


def psnr(a: Tensor, b: Tensor, peak: float = 2.0) -> float:
    """Peak signal-to-noise ratio in dB of two equally shaped tensors; ``peak`` is their range."""
    mse = (a.double() - b.double()).square().mean().clamp_min(1e-10)
    return float(10 * torch.log10(peak**2 / mse))


def color_masks(clip: Tensor) -> Tensor:
    """Which pixels of a clip [3, F, H, W] show each of the six colours: [6, F, H, W] of 0/1."""
    palette = torch.cat([PALETTE, BACKGROUND_PALETTE])
    distance = (clip.movedim(0, -1)[..., None, :] - palette).square().sum(-1)
    nearest, label = distance.min(-1)
    label = torch.where(nearest < NEAR, label, -1)
    return torch.stack([(label == i).float() for i in range(len(COLORS))])


def background_of(clip: Tensor) -> str:
    edges = torch.cat([clip[:, :, 0], clip[:, :, -1], clip[..., 0], clip[..., -1]], -1)
    median = edges.flatten(1).median(1).values
    return BACKGROUNDS[int((BACKGROUND_PALETTE - median).square().sum(1).argmin())]


def motion_of(mask: Tensor) -> str:
    """Motion of a mask [F, H, W] by least squares on its centre, or "still"."""
    area = mask.sum((1, 2))
    seen = area > SMALLEST / 2
    if seen.sum() < 2:
        return "none"
    time = torch.arange(len(mask), dtype=torch.float32)[seen]
    time = time - time.mean()
    speeds = []
    for axis in (COLUMNS, ROWS):
        center = (mask * axis).sum((1, 2))[seen] / area[seen]
        speeds.append(float((time * (center - center.mean())).sum() / time.square().sum()))
    vx, vy = speeds
    if max(abs(vx), abs(vy)) < SPEED / 2:
        return "still"
    if abs(vx) > abs(vy):
        return "right" if vx > 0 else "left"
    return "down" if vy > 0 else "up"


def shape_of(mask: Tensor) -> tuple[str, float]:
    """The shape whose outline, at the mask's own place and area, fits the mask [F, H, W] best,
    and their intersection over union, 0..1."""
    area = mask.sum((1, 2)).clamp_min(1)
    scores = {}
    for shape in SHAPES:
        radius = (area / AREA[shape]).sqrt()[:, None, None]
        x = (mask * COLUMNS).sum((1, 2)) / area
        y = (mask * ROWS).sum((1, 2)) / area
        if shape == "triangle":  # its centre of mass lies below its origin by 2/15 of its radius
            y = y - radius.flatten() * (0.8 - 2 / 3)
        ideal = shape_mask(shape, x, y, radius)
        overlap = torch.minimum(ideal, mask).sum((1, 2)) / torch.maximum(ideal, mask).sum((1, 2))
        scores[shape] = float(overlap.mean())
    best = max(scores, key=scores.__getitem__)
    return best, scores[best]


def check(clip: Tensor, caption: Caption) -> dict[str, bool]:
    """Each attribute the caption asks of a clip [3, F, H, W], and whether the clip shows it."""
    result = {"background": background_of(clip) == caption.background}
    masks = color_masks(clip)
    for i, thing in enumerate(caption.things):
        mask = masks[COLORS.index(thing.color)]
        shape, overlap = shape_of(mask)
        there = SMALLEST < float(mask.sum((1, 2)).mean()) < LARGEST and overlap > BLOB
        result[f"color {i}"] = there
        result[f"shape {i}"] = there and overlap > OUTLINE and shape == thing.shape
        result[f"motion {i}"] = there and motion_of(mask) == thing.motion
    return result


def attributes_right(clip: Tensor, caption: Caption) -> float:
    """Share of the caption's attributes that a clip [3, F, H, W] shows, in 0..1."""
    result = check(clip, caption)
    return sum(result.values()) / len(result)
