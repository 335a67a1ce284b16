"""Trying masks on the target's own queries and keys before they are used.

Some query rows are computed exactly. A head may use a mask that holds enough of their attention
mass: the fused mask, else its union with the template, else none, and the head is dense. Masks
that lie (another request's, another backbone's, random or empty ones) fail here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .observe import RECALL, Rows

SOURCES = ("fused", "union", "dense")
FUSED, UNION, DENSE = range(3)


@dataclass(frozen=True, eq=False)
class Verdict:
    """Per head [H] the source of its mask (an index into SOURCES) and the mass recall found."""

    source: Tensor
    recall: Tensor


def recall(mass: Tensor, mask: Tensor, rows: Rows) -> Tensor:
    """Mass recall float32 [H]: the mean over sampled rows of the attention mass inside a mask
    bool [H, blocks, blocks], of the worst sample of the batch. ``mass`` is [B, H, R, blocks]."""
    return _held(mass, mask, rows)[0]


def _held(mass: Tensor, mask: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """The mass recall [H], and the same less one standard error of the mean over rows."""
    held = (mass * mask[:, rows.blocks].to(mass.device)).sum(-1)
    mean = held.mean(-1)
    error = held.std(-1, unbiased=False) / held.shape[-1] ** 0.5
    return mean.amin(0).cpu(), (mean - error).amin(0).cpu()


def judge(
    mass: Tensor,
    fused: Tensor,
    union: Tensor,
    rows: Rows,
    least: float = RECALL,
    start: Tensor | None = None,
) -> Verdict:
    """The first of the fused mask, its union with the template and dense that holds ``least`` of
    the mass, per head, one standard error of the sample allowed for; ``start`` [H] is where to
    begin. NaN holds nothing."""
    means, bounds = zip(_held(mass, fused, rows), _held(mass, union, rows))
    dense = torch.ones_like(means[0])
    if start is None:
        start = torch.zeros(len(dense), dtype=torch.long)
    at = torch.arange(len(SOURCES))[:, None]
    allowed = (torch.stack([*bounds, dense]) >= least) & (at >= start)
    source = allowed.to(torch.uint8).argmax(0)
    return Verdict(source, torch.stack([*means, dense]).gather(0, source[None])[0])


def chosen(verdict: Verdict, fused: Tensor, union: Tensor) -> Tensor:
    """The masks bool [H, blocks, blocks] of a verdict; dense heads see everything."""
    source = verdict.source[:, None, None]
    return torch.where(source == FUSED, fused, union) | (source == DENSE)
