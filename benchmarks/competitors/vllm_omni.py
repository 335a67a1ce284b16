"""Chorus Stage 1 as vLLM-Omni builds it: the depth of the landing grows linearly with similarity.

Rule: vLLM-Omni, pull request 4937 (RFC 3978), InterRequestCacheBackend.compute_skip_steps, after
Chorus, arXiv:2604.04451, Stage 1: below a similarity of 0.75 a miss; else 5 steps are skipped, and
up to half of the schedule at similarity 1. Size, frames and step count must be equal. The
similarity here is the cosine of the conditionings; theirs is CLIP's.
"""

from __future__ import annotations

from .base import Competitor, Outcome
from .case import Case
from .landing import by_text, depth
from .nirvana import DEPTHS

THRESHOLD = 0.75
FEWEST = 5
MOST = 0.5  # share of the steps


def skipped(similarity: float, steps: int) -> int:
    """Steps that are skipped of a schedule; 0 is a miss."""
    if similarity < THRESHOLD:
        return 0
    most = int(steps * MOST)
    if most <= FEWEST:
        return FEWEST
    share = min((similarity - THRESHOLD) / (1 - THRESHOLD), 1.0)
    return FEWEST + int(share * (most - FEWEST))


def run(case: Case, knob: float) -> Outcome:
    """``knob``: what the rule's depths are multiplied by."""
    rows, steps = [], case.targets.steps
    for row in range(len(case.donors)):
        name, path, alike = case.by_text(row, same_steps=True)
        rows.append((name, path, depth(skipped(alike, steps) / steps, knob, steps)))
    return by_text(case, rows)


VLLM_OMNI = Competitor(
    "vllm_omni",
    "Chorus Stage 1 (vLLM-Omni)",
    "vllm-omni pull request 4937; arXiv:2604.04451",
    DEPTHS,
    run,
    1.0,
)
