"""Own extrapolation: derivatives that are not evaluated are carried on linearly from the last two.

First-order Taylor extrapolation of the model's output, as TaylorSeer (Liu et al., arXiv:2503.06923)
does it with features, with the evaluations spaced as suits it best.
"""

from __future__ import annotations

import torch

from .base import Competitor, Outcome
from .case import Case
from .plain import COUNTS, steps_for

LATE = 0.25  # best of 0, 0.25, 0.5 and 0.75 from 12 evaluations on, and but for 0 at 8


def run(case: Case, knob: float) -> Outcome:
    """``knob``: evaluations, of 30."""
    evaluations = steps_for(knob, case.targets.steps)
    latents, _ = case.targets.planned(case.targets.plan(evaluations, LATE), None)
    return Outcome(latents, torch.full((len(latents),), evaluations))


OWN = Competitor("own", "own linear extrapolation", "arXiv:2503.06923, first order", COUNTS, run)
