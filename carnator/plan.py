"""Which evaluations of a run are made, and which are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LATE = 0.25


@dataclass(frozen=True)
class Plan:
    """Evaluated call indices of a run of ``total`` calls; everything else is predicted."""

    total: int
    evaluated: frozenset[int]

    def __len__(self) -> int:
        return len(self.evaluated)

    def tightened(self, after: int) -> Plan:
        """The plan with every gap that lies beyond call ``after`` halved."""
        marks = sorted(self.evaluated)
        extra = {(a + b) // 2 for a, b in zip(marks, marks[1:], strict=False) if a >= after}
        return Plan(self.total, self.evaluated | extra)


def spaced(calls: Sequence[float], evaluations: int, late: float = LATE) -> Plan:
    """A plan of ``evaluations`` calls, the first and the last among them.

    ``calls`` are the sigmas of a run's calls, falling. The evaluations are equally spaced in a
    blend of the call's index (``late`` 0) and of its sigma (``late`` 1). A shifted schedule takes
    its long strides in sigma near the end, and the latent moves by ``d`` times the stride: what
    is predicted there weighs most, so that evaluations belong there as far as the predictor can
    bridge the beginning. Raises ValueError if the run has too few calls.
    """
    total = len(calls)
    if not 2 <= evaluations <= total:
        raise ValueError(
            f"A plan of {evaluations} evaluations does not fit a run of {total}: use 2 to {total}."
        )
    span = calls[0] - calls[-1]
    if not span > 0:
        raise ValueError(f"A run from sigma {calls[0]} to {calls[-1]} has nothing to plan.")
    place = [
        (1 - late) * i / (total - 1) + late * (calls[0] - s) / span for i, s in enumerate(calls)
    ]
    chosen: list[int] = []
    for n in range(evaluations):
        first = chosen[-1] + 1 if chosen else 0
        last = total - (evaluations - 1 - n)
        wanted = n / (evaluations - 1)
        chosen.append(min(range(first, last), key=lambda i: abs(place[i] - wanted)))
    chosen[-1] = total - 1
    return Plan(total, frozenset(chosen))


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
