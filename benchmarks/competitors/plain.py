"""Fewer steps: the sampler is simply given a shorter schedule."""

from __future__ import annotations

import torch

from carnator.demo.host import STEPS

from .base import Competitor, Outcome
from .case import Case

COUNTS = (5.0, 6.0, 8.0, 10.0, 12.0, 15.0, 18.0, 22.0, 26.0)


def steps_for(count: float, total: int) -> int:
    """``count`` steps of 30, of a run of ``total``."""
    return min(total, max(2, round(count * total / STEPS)))


def run(case: Case, knob: float) -> Outcome:
    """``knob``: steps, of 30."""
    steps = steps_for(knob, case.targets.steps)
    latents, _ = case.targets.with_steps(steps).dense()
    return Outcome(latents, torch.full((len(latents),), steps))


PLAIN = Competitor("plain", "plain fewer steps", "every sampler", COUNTS, run)
