"""LazyCache: the host's own simpler form of EasyCache, on the guided result.

Rule: ComfyUI 0.33.0, comfy_extras/nodes_easycache.py, node LazyCache. The same estimate as
EasyCache's, of the guided denoised latent instead of the network's output, and the cached
difference is denoised - x. It watches from the first step and may skip from 15 % on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Batch
from .base import Competitor, Outcome, Stepwise
from .case import Case
from .easycache import DEFAULT, END, START, THRESHOLDS, ChangeRate, magnitude, percent_to_sigma


class LazyCache(Stepwise):
    """The rule over a batch."""

    def __init__(self, batch: Batch, threshold: float):
        super().__init__(batch)
        self.start = percent_to_sigma(START, batch.shift)
        self.end = percent_to_sigma(END, batch.shift)
        self.state = ChangeRate(threshold, len(batch.captions))
        self.kept = torch.zeros_like(batch.noise)

    def wants(self, x: Tensor, sigma: float) -> Tensor:
        if self.end < sigma <= self.start:
            return ~self.state.skips(x)
        self.state.passed()
        return torch.ones(len(x), dtype=torch.bool)

    def answer(self, x: Tensor, sigma: float) -> Tensor:
        return x + self.kept

    def learn(
        self, rows: Tensor, x: Tensor, sigma: float, parts: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        if sigma <= self.end:
            return
        self.kept[rows] = parts[0] - x
        self.state.learn(rows, x, parts[0], magnitude(parts[0]))


def run(case: Case, knob: float) -> Outcome:
    """``knob``: reuse threshold."""
    return LazyCache(case.targets, knob).outcome()


LAZYCACHE = Competitor(
    "lazycache", "LazyCache (host)", "ComfyUI nodes_easycache.py", THRESHOLDS, run, DEFAULT
)
