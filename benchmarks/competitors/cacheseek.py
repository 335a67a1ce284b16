"""CacheSeek's staircase: the deepest landing whose risk of donor drift is acceptable at a score.

Rule: github.com/Tele-AI/CacheSeek, cacheseek/service/config.py, skip_step_tau_table: of 40 steps 3
are skipped from a score of 0.63, 11 from 0.85, by a logistic fit of P(donor drift | score) inverted
at 20 % (7 steps share the threshold of 11; 14 are switched off). The score is a vision-language
reranker's there, fitted to one model and workload; the cosine of the conditionings stands in for it
here. Step counts are taken as shares of the schedule.
"""

from __future__ import annotations

from .base import Competitor, Outcome
from .case import Case
from .landing import by_text, depth
from .nirvana import DEPTHS

STAIRS = {3: 0.63, 7: 0.85, 11: 0.85}
STEPS = 40


def skipped(score: float) -> int:
    """Steps of 40 that are skipped; 0 is a miss."""
    return max((k for k, least in STAIRS.items() if score >= least), default=0)


def run(case: Case, knob: float) -> Outcome:
    """``knob``: what the staircase's depths are multiplied by."""
    rows = []
    for row in range(len(case.donors)):
        name, path, alike = case.by_text(row)
        rows.append((name, path, depth(skipped(alike) / STEPS, knob, case.targets.steps)))
    return by_text(case, rows)


CACHESEEK = Competitor(
    "cacheseek", "CacheSeek's staircase", "github.com/Tele-AI/CacheSeek", DEPTHS, run, 1.0
)
