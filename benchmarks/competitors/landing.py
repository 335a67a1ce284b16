"""Jumping onto the latent of an earlier run and going on from there, as most systems do.

A jump from step ``start`` to step ``end`` is run as the straight line between the two latents, so
that the sampler takes it without a restart; it arrives exactly. Rules that decide before the first
step start at 0, where the earlier run's noise replaces the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Batch
from .base import Outcome, Stepwise
from .case import Case, Path


@dataclass(frozen=True)
class Jump:
    """Where one request lands: on ``weight`` times the latent of ``path`` at step ``end`` of the
    target's schedule, coming from step ``start``. ``name`` tells sources apart."""

    name: str
    path: Path
    end: int
    start: int = 0
    weight: float = 1.0


class Landing(Stepwise):
    """Evaluated everywhere but between ``start`` and ``end`` [B], where ``goal`` [B, ...] lies."""

    def __init__(self, batch: Batch, start: Tensor, end: Tensor, goal: Tensor):
        super().__init__(batch)
        if batch.sampler != "euler":
            raise ValueError(f"Landing is run with Euler steps, not with {batch.sampler!r}.")
        self.start, self.end, self.goal = start, end, goal

    def wants(self, x: Tensor, sigma: float) -> Tensor:
        return (self.step < self.start) | (self.step >= self.end)

    def answer(self, x: Tensor, sigma: float) -> Tensor:
        after = self.batch.sigmas[self.end].view(-1, 1, 1, 1, 1)
        # Rows that do not jump here get nonsense, which their evaluations replace.
        span = torch.where(after < sigma, sigma - after, 1.0)
        return x - sigma * (x - self.goal) / span


def land(case: Case, jumps: Sequence[Jump | None]) -> Outcome:
    """Run the targets with their jumps; None is a miss, which runs dense.

    Rules that land at the same place share the run.
    """
    batch, total = case.targets, case.targets.steps
    keys = [
        (row, None) if j is None else (row, j.name, j.start, j.end, round(j.weight, 6))
        for row, j in enumerate(jumps)
    ]
    missing = [row for row, key in enumerate(keys) if key not in case.landings]
    if missing:
        chosen = [jumps[row] for row in missing]
        start = torch.tensor([0 if j is None else j.start for j in chosen])
        end = torch.tensor([0 if j is None else j.end for j in chosen])
        levels = batch.sigmas.tolist()
        goal = torch.stack(
            [
                torch.zeros_like(batch.noise[0])
                if j is None
                else j.weight * j.path.at(levels[j.end])
                for j in chosen
            ]
        )
        latents = Landing(batch.select(missing), start, end, goal).outcome().latents
        for row, latent in zip(missing, latents, strict=True):
            case.landings[keys[row]] = latent
    evaluations = [total if j is None else total - (j.end - j.start) for j in jumps]
    return Outcome(torch.stack([case.landings[k] for k in keys]), torch.tensor(evaluations))


def depth(share: float, scale: float, steps: int) -> int:
    """The step at which ``scale`` times a share of a schedule lies, at least 1 and before the
    last; 0 for a share of 0, which is a miss."""
    if share <= 0:
        return 0
    return min(max(1, round(share * scale * steps)), steps - 1)


def by_text(case: Case, rows: Sequence[tuple[str, Path | None, int]]) -> Outcome:
    """Land each target on the run retrieved for it, at the step given; 0 is a miss."""
    return land(
        case, [Jump(name, path, k) if k and path is not None else None for name, path, k in rows]
    )
