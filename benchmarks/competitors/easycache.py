"""EasyCache as the host ships it: skip while the output is expected to have changed little.

Rule: ComfyUI 0.33.0, comfy_extras/nodes_easycache.py, node EasyCache, after Zhou et al.,
"Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive Caching",
arXiv:2507.02860. Two evaluations set the transformation rate k = |dv| / |dx|. At every later step
the expected change k |x - x_prev| / |v_prev| is added up, x_prev and v_prev being those of the last
evaluation; below the threshold the step is skipped with v = x + (v_prev - x_prev), else it is
evaluated and the sum starts again. Means of absolute values over every eighth row and column of
the first batch entry, which in the host is the unconditional branch; |v_prev| over both branches,
all of it. Live from 15 % to 95 % of the schedule's time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from carnator.derivative import derivative

from ..batch import Batch
from .base import Competitor, Outcome, Stepwise
from .case import Case

START, END = 0.15, 0.95
SUBSAMPLE = 8
DEFAULT = 0.2
THRESHOLDS = (0.8, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125)


def percent_to_sigma(percent: float, shift: float) -> float:
    """The noise level at a share of a flow schedule's time, as the host has it."""
    t = 1 - percent
    return shift * t / (1 + (shift - 1) * t)


def magnitude(values: Tensor) -> Tensor:
    """Mean absolute value [B] of each row of a tensor [B, ...]."""
    return values.abs().flatten(1).mean(1)


def subsampled(latents: Tensor) -> Tensor:
    return latents[..., ::SUBSAMPLE, ::SUBSAMPLE]


class ChangeRate:
    """The host's running estimate of how much the output changes, for each request [B] of a batch.

    ``norm``, ``rate`` and ``total`` are [B]; None is what the host has not yet met.
    """

    def __init__(self, threshold: float, count: int):
        self.threshold = threshold
        self.x: Tensor | None = None  # subsampled, at the last evaluation
        self.output: Tensor | None = None
        self.norm = torch.zeros(count)
        self.rate: Tensor | None = None
        self.total = torch.zeros(count)
        self._change: Tensor | None = None

    def skips(self, x: Tensor) -> Tensor:
        """Which requests skip the step at latents x [B, ...]."""
        nobody = torch.zeros(len(x), dtype=torch.bool)
        self._change = None if self.x is None else magnitude(subsampled(x) - self.x)
        if self._change is None or self.rate is None:
            return nobody
        self.total = self.total + self.rate * self._change / self.norm
        skip = self.total < self.threshold
        self.total = torch.where(skip, self.total, 0.0)
        return skip

    def passed(self) -> None:
        """A step before the rule is live: no input change is measured."""
        self._change = None

    def learn(self, rows: Tensor, x: Tensor, output: Tensor, norm: Tensor) -> None:
        """Take the output [R, ...] at x [R, ...] of some rows, and its mean magnitude [R]."""
        x, output = subsampled(x), subsampled(output)
        if self.x is None or self.output is None:  # the first evaluation is everybody's
            self.x, self.output, self.norm = x.clone(), output.clone(), norm.clone()
            return
        if self._change is not None:
            if self.rate is None:
                self.rate = torch.zeros(len(self.norm))
            self.rate[rows] = magnitude(output - self.output[rows]) / self._change[rows]
        self.x[rows], self.output[rows], self.norm[rows] = x, output, norm


class EasyCache(Stepwise):
    """The rule over a batch; the cached difference [B, 2, C, ...] is kept per branch."""

    def __init__(self, batch: Batch, threshold: float):
        super().__init__(batch)
        self.start = percent_to_sigma(START, batch.shift)
        self.end = percent_to_sigma(END, batch.shift)
        self.state = ChangeRate(threshold, len(batch.captions))
        self.kept = torch.zeros(len(batch.captions), 2, *batch.noise.shape[1:])

    def wants(self, x: Tensor, sigma: float) -> Tensor:
        if not self.end < sigma <= self.start:
            return torch.ones(len(x), dtype=torch.bool)
        return ~self.state.skips(x)

    def answer(self, x: Tensor, sigma: float) -> Tensor:
        positive, negative = (x - sigma * (x + self.kept[:, i]) for i in (0, 1))
        return self.batch.guide(positive, negative)

    def learn(
        self, rows: Tensor, x: Tensor, sigma: float, parts: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        if sigma <= self.end:
            return
        v = torch.stack([derivative(x, part, sigma) for part in parts[1:]], 1)
        self.kept[rows] = v - x[:, None]
        if sigma <= self.start:
            self.state.learn(rows, x, v[:, 1], magnitude(v))


def run(case: Case, knob: float) -> Outcome:
    """``knob``: reuse threshold."""
    return EasyCache(case.targets, knob).outcome()


EASYCACHE = Competitor(
    "easycache",
    "EasyCache (host)",
    "ComfyUI nodes_easycache.py; arXiv:2507.02860",
    THRESHOLDS,
    run,
    DEFAULT,
)
