"""TeaCache: skip while the rescaled change of the timestep-modulated input adds up to little.

Rule: Liu et al., "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model",
arXiv:2411.19108, and its ports at github.com/ali-vilab/TeaCache. The relative L1 change of a
signal from step to step, rescaled by a polynomial of degree 4, is added up; below the threshold
the blocks are skipped and their last residual is added to the tokens instead, else they run and
the sum starts again. The signal is each port's: Wan's looks at the projected time embedding alone
and keeps the first 5 of 50 steps, HunyuanVideo's and LTX-Video's at the modulated input of the
first block and keep the first and the last step. Both guidance branches are judged together.

The polynomials published belong to the published checkpoints; here they are fitted, in the same
way, to dense runs of the bundled backbone: the relative L1 change of the output over that of the
signal.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from carnator.demo import captions
from carnator.demo.host import CFG, STEPS
from carnator.demo.model import EmbeddedModel
from carnator.derivative import derivative

from ..batch import Batch, embedding
from .base import Competitor, Outcome, Stepwise
from .case import Case
from .internals import Stack, shortened, signal

DEGREE = 4
PUBLISHED = 0.08  # Wan 2.1 1.3B; 0.15 HunyuanVideo, 0.05 LTX-Video, each for its own polynomial
THRESHOLDS = (0.4, 0.25, 0.15, PUBLISHED, 0.05, 0.03, 0.015)
KEPT = {"wan": (0.1, 0), "hunyuan": (0, 1), "ltx": (0, 1)}  # share of first steps, number of last


def relative_change(now: Tensor, before: Tensor) -> Tensor:
    """Relative L1 change [B] of tensors [B, K]."""
    return (now - before).abs().mean(1) / before.abs().mean(1)


def always(family: str, steps: int) -> tuple[int, int]:
    """The first step that may be skipped, and the step from which on none may."""
    first, last = KEPT[family]
    return max(1, round(first * steps)), steps - last


def texts(batch: Batch) -> Tensor:
    """The text [2 B, L, D] of both branches, the conditional ones first."""
    cond = torch.stack([embedding(c) for c in batch.captions])
    return torch.cat([cond, embedding(None)[None].expand_as(cond)])


def signals(batch: Batch, x: Tensor, sigma: float) -> Tensor:
    """The signal [B, K] of both branches of every request."""
    return torch.cat(signal(batch.model, torch.cat([x, x]), sigma, texts(batch)).chunk(2), dim=1)


class TeaCache(Stepwise):
    """The rule over a batch; ``kept`` [B, 2, N, C] are the residuals of both branches."""

    def __init__(self, batch: Batch, threshold: float, rescale: np.poly1d):
        super().__init__(batch)
        self.threshold, self.rescale = threshold, rescale
        self.first, self.last = always(batch.model.family.name, batch.steps)
        self.total = torch.zeros(len(batch.captions))
        self.before: Tensor | None = None
        self.kept: Tensor | None = None

    def wants(self, x: Tensor, sigma: float) -> Tensor:
        now, before = signals(self.batch, x, sigma), self.before
        self.before = now
        if before is None or not self.first <= self.step < self.last:
            self.total = torch.zeros(len(x))
            return torch.ones(len(x), dtype=torch.bool)
        change = self.rescale(relative_change(now, before).double().numpy())
        self.total = self.total + torch.from_numpy(np.asarray(change)).float()
        wanted = self.total >= self.threshold
        self.total = torch.where(wanted, 0.0, self.total)
        return wanted

    def evaluate(self, some: Batch, x: Tensor, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
        with Stack(some.model) as stack:
            parts = super().evaluate(some, x, sigma)
        self._residual = torch.stack(stack.residual.chunk(2), 1)
        return parts

    def learn(
        self, rows: Tensor, x: Tensor, sigma: float, parts: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        if self.kept is None:
            self.kept = torch.zeros(len(self.total), *self._residual.shape[1:])
        self.kept[rows] = self._residual

    def answer(self, x: Tensor, sigma: float) -> Tensor:
        assert self.kept is not None  # the first step is always evaluated
        short = shortened(self.batch.model, torch.cat(list(self.kept.unbind(1))))
        return self.batch.branches(x, sigma, short)[0]


@torch.no_grad()
def fit(model: EmbeddedModel, runs: int, seed: int = 4) -> np.poly1d:
    """TeaCache's polynomial for a backbone, from dense runs of random captions."""
    rng = random.Random(f"carnator teacache {seed}")
    what = [captions.random_caption(rng) for _ in range(runs)]
    batch = Batch.of(model, what, [rng.randrange(2**32) for _ in what], [CFG] * runs, STEPS)
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def denoise(x: Tensor, sigma: float) -> Tensor:
        guided, positive, negative = batch.branches(x, sigma)
        inputs.append(signals(batch, x, sigma))
        both = [derivative(x, p, sigma).flatten(1) for p in (positive, negative)]
        outputs.append(torch.cat(both, 1))
        return guided

    batch.run(denoise)
    x, y = (
        torch.cat([relative_change(b, a) for a, b in zip(values, values[1:], strict=False)])
        for values in (inputs, outputs)
    )
    return np.poly1d(np.polyfit(x.double().numpy(), y.double().numpy(), DEGREE))


def run(case: Case, knob: float) -> Outcome:
    """``knob``: threshold."""
    return TeaCache(case.targets, knob, case.rescale).outcome()


TEACACHE = Competitor(
    "teacache",
    "TeaCache",
    "arXiv:2411.19108; polynomial fitted to this backbone",
    THRESHOLDS,
    run,
    PUBLISHED,
)
