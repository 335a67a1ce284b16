"""How well a backbone draws what captions ask: dense runs on captions that training never saw."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import host, quality
from .captions import Caption, embed, random_caption
from .model import EmbeddedModel

CAPTIONS = 200
BATCH = 20


def held_out_captions(count: int, seed: int = 0) -> list[Caption]:
    """So many different captions from the tenth that training leaves out."""
    rng = random.Random(f"carnator check {seed}")
    found: dict[Caption, None] = {}
    while len(found) < count:
        caption = random_caption(rng)
        if caption.held_out:
            found[caption] = None
    return list(found)


@torch.no_grad()
def dense_clips(
    model: EmbeddedModel,
    what: Sequence[Caption],
    seeds: Sequence[int],
    *,
    cfg: float,
    steps: int,
    progress: Callable[[int], object] | None = None,
) -> Tensor:
    """Clips [B, 3, 4, 32, 32] of captions by Euler steps that are all evaluated, in one batch."""
    cond, uncond = torch.stack([embed(c) for c in what]), embed(None)[None]
    noise = torch.cat([host.seed_noise(seed, model.family.shape) for seed in seeds])

    def denoise(x: Tensor, sigma: float) -> Tensor:
        positive, negative = model.branches(x, sigma, cond, uncond)
        assert negative is not None, "an unconditional text was given"
        if progress is not None:
            progress(len(x))
        return negative + (positive - negative) * cfg

    return model.family.to_clip(host.euler(denoise, noise, host.simple_sigmas(steps)))


def measure(
    model: EmbeddedModel,
    count: int = CAPTIONS,
    *,
    cfg: float = host.CFG,
    steps: int = host.STEPS,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Shares in 0..1 of the attributes of held-out captions that dense runs show.

    ``attributes_right`` is the mean over captions, ``by_attribute`` over all colours, shapes,
    motions and backgrounds asked for. Clip i starts from the noise of seed ``seed + i``.
    ``progress`` is told of every clip's every step.
    """
    asked = held_out_captions(count, seed)
    scores: list[float] = []
    answers: dict[str, list[bool]] = {}
    for first in range(0, count, BATCH):
        part = asked[first : first + BATCH]
        seeds = range(seed + first, seed + first + len(part))
        made = dense_clips(model, part, seeds, cfg=cfg, steps=steps, progress=progress)
        for clip, caption in zip(made, part, strict=True):
            result = quality.check(clip, caption)
            scores.append(sum(result.values()) / len(result))
            for name, right in result.items():
                answers.setdefault(name.split()[0], []).append(right)
    return {
        "backbone": model.family.name,
        "model": model.name,
        "captions": count,
        "seed": seed,
        "cfg": cfg,
        "steps": steps,
        "attributes_right": round(sum(scores) / count, 4),
        "all_right": round(sum(score == 1 for score in scores) / count, 4),
        "by_attribute": {k: round(sum(v) / len(v), 4) for k, v in sorted(answers.items())},
    }
