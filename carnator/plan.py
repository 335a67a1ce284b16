"""Which evaluations of a run are made, and which are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LATE = 0.675
FIRST = 0.85  # length of the first gap in others: nothing is known of the slope there


@dataclass(frozen=True)
class Plan:
    """Evaluated call indices of a run of ``total`` calls; everything else is predicted."""

    total: int
    evaluated: frozenset[int]

    def __len__(self) -> int:
        return len(self.evaluated)

    def tightened(self, after: int) -> Plan:
        """The plan with twice as many gaps beyond the evaluated call ``after``, as far as there
        are calls; gaps that only shortened still do."""
        marks = sorted(self.evaluated)
        kept = [m for m in marks if m <= after]
        old = np.diff([m for m in marks if m >= after])
        gaps = [part for gap in old.tolist() for part in ((gap + 1) // 2, gap // 2) if part]
        if np.all(np.diff(old) <= 0):
            gaps.sort(reverse=True)
        return Plan(self.total, frozenset([*kept, *(after + np.cumsum(gaps)).tolist()]))


def spaced(calls: Sequence[float], evaluations: int, late: float = LATE) -> Plan:
    """A plan of ``evaluations`` calls, the first and the last among them.

    ``calls`` are the sigmas of a run's calls, falling. All gaps are equally long, in calls or in
    ``late`` times sigma, whichever counts more: a shifted schedule takes its long strides in sigma
    near the end, and the latent moves by ``d`` times the stride. Gaps change in one direction as
    far as whole numbers allow, since a long one after a short one enlarges what the short one's
    slope has of noise. Raises ValueError if the run has too few calls.
    """
    total = len(calls)
    if not 2 <= evaluations <= total:
        raise ValueError(
            f"A plan of {evaluations} evaluations does not fit a run of {total}: use 2 to {total}."
        )
    span = calls[0] - calls[-1]
    if not span > 0:
        raise ValueError(f"A run from sigma {calls[0]} to {calls[-1]} has nothing to plan.")
    strides = -np.diff(np.asarray(calls, dtype=np.float64)) * (total - 1) / span
    place = np.concatenate([[0.0], np.cumsum(np.maximum(1.0, late * strides))])
    ends = np.cumsum([0.0, FIRST, *[1.0] * (evaluations - 2)])
    widths = np.diff(np.interp(ends / ends[-1] * place[-1], place, np.arange(total)))
    marks = np.cumsum([0, *_whole(widths.round(6), total - 1)])
    return Plan(total, frozenset(marks.tolist()))


def _whole(ideal: np.ndarray, total: int) -> list[int]:
    """Whole gaps of at least 1 that add up to ``total``, near ``ideal`` [gaps] and, but for the
    first, in the order of their lengths."""
    gaps = np.maximum(1, np.floor(ideal)).astype(int)
    while gaps.sum() < total:
        gaps[np.argmax(ideal - gaps)] += 1
    while gaps.sum() > total:
        gaps[np.argmin(np.where(gaps > 1, ideal - gaps, np.inf))] -= 1
    order = np.argsort(-ideal[1:], kind="stable")
    gaps[1:][order] = np.sort(gaps[1:])[::-1].copy()
    return gaps.tolist()


def probed(calls: Sequence[float], evaluations: int, late: float = LATE) -> Plan:
    """A plan whose first two calls are evaluated, the second being where donors are judged; the
    rest is ``spaced`` from there on."""
    if not 3 <= evaluations <= len(calls):
        raise ValueError(
            f"A probed plan of {evaluations} evaluations does not fit a run of {len(calls)}: use "
            f"3 to {len(calls)}."
        )
    rest = spaced(calls[1:], evaluations - 1, late)
    return Plan(len(calls), frozenset({0, *(i + 1 for i in rest.evaluated)}))
