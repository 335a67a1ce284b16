"""What every competitor is made of: a name, a source, a knob, and a way to run a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Batch
from .case import Case


@dataclass(frozen=True)
class Outcome:
    """Latents [B, ...] of a batch of targets, and the evaluations [B] each of them needed.

    An evaluation is one of both guidance branches at one noise level.
    """

    latents: Tensor
    evaluations: Tensor


@dataclass(frozen=True)
class Competitor:
    """A published rule in this harness.

    ``knobs`` are the values its curve is measured at, from few evaluations to many, and
    ``published`` the one its authors ship, where there is one.
    """

    name: str
    label: str
    source: str
    knobs: tuple[float, ...]
    run: Callable[[Case, float], Outcome]
    published: float | None = None


class Stepwise:
    """A run in which, at each step, some requests are evaluated and others answered for.

    It is the ``denoise`` of ``Batch.run``. What follows per rule: ``wants`` says who is to be
    evaluated [B], ``answer`` gives denoised latents for the others, ``learn`` is told what the
    evaluated ones got. ``evaluations`` [B] counts.
    """

    def __init__(self, batch: Batch):
        self.batch = batch
        self.step = 0
        self.evaluations = torch.zeros(len(batch.captions), dtype=torch.long)

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        wanted = self.wants(x, sigma)
        rows = wanted.nonzero().flatten()
        out = self.answer(x, sigma) if len(rows) < len(x) else x.clone()
        if len(rows):
            some = self.batch.select(rows.tolist())
            guided, positive, negative = self.evaluate(some, x[rows], sigma)
            self.learn(rows, x[rows], sigma, (guided, positive, negative))
            out[rows] = guided
        self.evaluations += wanted
        self.step += 1
        return out

    def evaluate(self, some: Batch, x: Tensor, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
        """Guided, conditional and unconditional denoised latents of the evaluated requests."""
        return some.branches(x, sigma)

    def wants(self, x: Tensor, sigma: float) -> Tensor:
        raise NotImplementedError

    def answer(self, x: Tensor, sigma: float) -> Tensor:
        raise NotImplementedError

    def learn(
        self, rows: Tensor, x: Tensor, sigma: float, parts: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Told of every evaluation; most rules keep something of it."""

    def outcome(self) -> Outcome:
        """Run the batch."""
        latents = self.batch.run(self)
        return Outcome(latents, self.evaluations)
