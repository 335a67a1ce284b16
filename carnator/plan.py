"""Which evaluations of a run are made, and which are predicted."""

from __future__ import annotations

from dataclasses import dataclass


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

    def dense_after(self, call: int) -> Plan:
        """The plan with everything beyond ``call`` evaluated."""
        return Plan(self.total, self.evaluated | set(range(call, self.total)))


def spaced(total: int, evaluations: int) -> Plan:
    """``evaluations`` calls of ``total``, equally spaced in call index, first and last included.

    Equal spacing in index follows the schedule, which is dense where the path bends most.
    """
    if not 2 <= evaluations <= total:
        raise ValueError(
            f"A plan of {evaluations} evaluations does not fit a run of {total}: use 2 to {total}."
        )
    step = (total - 1) / (evaluations - 1)
    return Plan(total, frozenset(round(i * step) for i in range(evaluations)))
