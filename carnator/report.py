"""What happened in a run and why, as data and as text."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .matching import Match
    from .sparse import SparseReport


@dataclass(frozen=True)
class StepLog:
    """One call of the sampler: ``kind`` is ``evaluated``, ``predicted`` or ``served``; ``error``
    is the RMS error of the prediction an evaluation replaced, where one was measured."""

    index: int
    sigma: float
    kind: str
    error: float | None = None


@dataclass
class Report:
    """One request. ``decision`` is ``dense`` (reuse was not tried), ``miss``, ``hit``, ``exact``,
    or ``connectivity`` where every step is evaluated, some with sparse attention; ``scope``
    [F, h, w] is the weight of the donor per token, 0..1. ``sparse`` is there when sparse attention
    is switched on."""

    decision: str = "dense"
    reason: str = ""
    preset: str = ""
    budget_db: float = 0.0
    evaluations: int = 0
    dense_evaluations: int = 0
    expected_db: float | None = None
    measured_db: float | None = None
    d0: float | None = None
    d1: float | None = None
    donor: str | None = None
    donor_label: str = ""
    calibrated: bool = True
    seconds: float = 0.0
    seconds_saved: float = 0.0
    record: str = "not recorded"
    notes: list[str] = field(default_factory=list)
    steps: list[StepLog] = field(default_factory=list)
    scope: np.ndarray | None = None
    sparse: SparseReport | None = None

    def judged(self, verdict: Match) -> None:
        """Take over what a match says."""
        self.decision, self.reason = verdict.decision, verdict.reason
        self.d0, self.d1, self.expected_db = verdict.d0, verdict.d1, verdict.expected_db
        if verdict.table is not None:
            self.calibrated = verdict.table.calibrated

    def closed(self, calls: int, seconds: float, evaluation_seconds: float) -> None:
        """The run of so many calls of the sampler has ended."""
        if self.decision == "candidate":
            self.decision, self.reason = "miss", "the run ended before its second evaluation"
        self.dense_evaluations, self.seconds = calls, seconds
        skipped = calls - self.evaluations
        self.seconds_saved = skipped * evaluation_seconds / max(1, self.evaluations)

    def sparsely(self) -> None:
        """An evaluation was made with sparse attention."""
        if self.decision in ("dense", "miss"):
            self.decision = "connectivity"

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def as_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold; the scope map as nested lists rounded to 1/1000."""
        data = asdict(self)
        if self.scope is not None:
            data["scope"] = np.round(self.scope.astype(float), 3).tolist()
        for key, value in data.items():
            if isinstance(value, float) and not math.isfinite(value):
                data[key] = None
        return data

    def line(self) -> str:
        """One line for the log."""
        ratio = self.dense_evaluations / max(1, self.evaluations)
        text = f"{self.decision}: {self.reason}" if self.reason else self.decision
        return f"{text}; {self.evaluations} of {self.dense_evaluations} evaluations ({ratio:.2f}x)"

    def text(self) -> str:
        """A few lines for a person."""
        lines = [f"Decision: {self.decision}" + (f" ({self.reason})" if self.reason else "")]
        ratio = self.dense_evaluations / max(1, self.evaluations)
        lines.append(
            f"Evaluations: {self.evaluations} of {self.dense_evaluations} ({ratio:.2f}x fewer)"
        )
        if self.donor:
            lines.append(f"Donor: {self.donor_label or self.donor}")
        if self.d0 is not None:
            lines.append(f"D0 (first derivative against the donor's): {self.d0:.4g}")
        if self.d1 is not None:
            lines.append(f"D1 (second derivative against the donor's): {self.d1:.4g}")
        if self.expected_db is not None:
            lines.append(
                f"Budget {self.budget_db:g} dB ({self.preset}); the plan is trusted to keep "
                f"{self.expected_db:.1f} dB"
            )
        if self.measured_db is not None:
            lines.append(f"Estimated while running: {self.measured_db:.1f} dB")
        if self.donor and not self.calibrated:
            lines.append("This backbone has no risk table of its own; one with a margin was used.")
        if self.steps:
            marks = {"evaluated": "#", "predicted": ".", "served": "="}
            plan = "".join(marks.get(step.kind, "?") for step in self.steps)
            lines.append(f"Steps (# evaluated, . predicted, = served): {plan}")
        lines.append(f"Sampling took {self.seconds:.2f} s; saved about {self.seconds_saved:.2f} s")
        if self.sparse is not None:
            lines += self.sparse.lines()
        lines.append(f"Record: {self.record}")
        return "\n".join([*lines, *self.notes])
