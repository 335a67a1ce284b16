"""NIRVANA: land on the latent of the run with the most similar prompt, the deeper the more alike.

Rule: Agarwal et al., "Approximate Caching for Efficiently Serving Text-to-Image Diffusion Models",
NSDI 2024, arXiv:2312.04429: of 50 steps 25 are skipped above a similarity of 0.95, 20 above 0.9, 15
above 0.85, 10 above 0.75, 5 above 0.65, and none below. The similarity here is the cosine of the
conditionings; theirs is CLIP's. Step counts are taken as shares of the schedule.
"""

from __future__ import annotations

from .base import Competitor, Outcome
from .case import Case
from .landing import by_text, depth

TABLE = ((0.95, 25), (0.9, 20), (0.85, 15), (0.75, 10), (0.65, 5))
STEPS = 50
DEPTHS = (1.25, 1.0, 0.75, 0.5, 0.25, 0.1)


def skipped(similarity: float) -> int:
    """Steps of 50 that are skipped; 0 is a miss."""
    return next((k for above, k in TABLE if similarity > above), 0)


def run(case: Case, knob: float) -> Outcome:
    """``knob``: what the table's depths are multiplied by."""
    rows = []
    for row in range(len(case.donors)):
        name, path, alike = case.by_text(row)
        rows.append((name, path, depth(skipped(alike) / STEPS, knob, case.targets.steps)))
    return by_text(case, rows)


NIRVANA = Competitor("nirvana", "NIRVANA's table", "arXiv:2312.04429", DEPTHS, run, 1.0)
