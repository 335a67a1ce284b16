"""Recall of masks at real width, where there are only random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carnator.connectivity import layout, row_mass, sample_rows
from carnator.connectivity.observe import block_scores
from carnator.demo import captions
from carnator.demo.model import EmbeddedModel

from . import joint_model
from .mask_sources import Seen, kept, radial

DENSITIES = (0.15, 0.3)
SIGMA = 0.8
SMALL_GRID = (2, 16, 32)
TARGET, DONOR = "green circle left on gray", "red circle left on gray"
OTHERS = ("blue square up on white", "cyan triangle still on black", "yellow circle down on gray")
NARROW = 64  # width of the feed-forward layers, which have little part in queries and keys


def latents(shape: tuple[int, ...], seed: int, change: float = 0.0) -> Tensor:
    """Latents at SIGMA: something smooth under noise of a seed; ``change`` mixes in another."""

    def smooth(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.randn(1, shape[1], 2, 6, 6, generator=generator)
        return F.interpolate(coarse, size=shape[2:], mode="trilinear")

    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))
    clean = (1 - change) * smooth(seed) + change * smooth(seed + 1)
    return (1 - SIGMA) * clean + SIGMA * noise


@torch.no_grad()
def last_layer(model: EmbeddedModel, text: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [H, N, D] of the second and last layer."""
    held: list[tuple[Tensor, Tensor]] = []

    class Enough(Exception):
        pass

    def show(layer: int, q: Tensor, k: Tensor, _: Tensor) -> None:
        if layer == 1:
            held.append((q, k))
            raise Enough

    try:
        cond = captions.embed(captions.parse(text))[None]
        model.branches(x, SIGMA, cond, None, None, Seen(2, show))
    except Enough:
        pass
    return held[0]


def built(local: bool, quick: bool) -> EmbeddedModel:
    sizes = {"dim": 384, "heads": 3} if quick else {}
    return joint_model.built(ffn=NARROW, layers=2, local=local, **sizes)


def wide(quick: bool) -> list[dict[str, Any]]:
    """A row for every kind of weights, density and source."""
    return [row for local in (False, True) for row in rows(local, quick)]


def rows(local: bool, quick: bool) -> Iterator[dict[str, Any]]:
    model, grid = built(local, quick), SMALL_GRID if quick else joint_model.GRID
    shape, at = joint_model.latent_shape(grid), layout(grid)
    q, k = last_layer(model, TARGET, latents(shape, 0, 0.2))
    scale = q.shape[-1] ** -0.5
    sampled = sample_rows(at, 3)
    mass = row_mass(q[None], k[None], at, sampled, scale)[0]
    scores = {"online": block_scores(q, k, at, scale), "radial": radial(at, len(q))}
    del q, k
    scores["donor"] = block_scores(*last_layer(model, DONOR, latents(shape, 0)), at, scale)
    strangers = [
        block_scores(*last_layer(model, text, latents(shape, 10 * (i + 1))), at, scale)
        for i, text in enumerate(OTHERS)
    ]
    scores["random"] = strangers[0]
    scores["template"] = torch.stack(strangers[1:]).mean(0)
    for density in DENSITIES:
        for source, own in scores.items():
            mask = kept(own, at, density)
            yield {
                "weights": "local by construction" if local else "random",
                "tokens": at.tokens,
                "density": density,
                "source": source,
                "recall": round(float((mass * mask[:, sampled.blocks]).sum(-1).mean()), 4),
            }
