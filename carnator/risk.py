"""Expected deviation of a plan from the dense run, and the watch kept on it while it runs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

PRESETS = {"faithful": 36.0, "balanced": 31.0, "fast": 27.0}  # dB against the own dense run
LOOSE = ("fast",)  # presets that most runs keep; the others nearly all
WORTH = 0.5  # largest share of a run a plan may evaluate
SLACK = 0.25  # share of the budget that may be spent at any time
UNCALIBRATED_MARGIN = 3.0  # dB asked for on top where a backbone has no table of its own


@dataclass(frozen=True)
class Row:
    """What plans ``probed(calls, evaluations, late)`` were measured to reach.

    ``knots`` are (log10 D1, mean dB, strictly trusted dB, loosely trusted dB), D1 rising; all fall
    along them, so that acceptance is monotone in D1. Linear in between.
    """

    evaluations: int
    late: float
    knots: tuple[tuple[float, float, float, float], ...]

    def mean(self, d1: float) -> float:
        """Mean PSNR in dB against the own dense run."""
        return self._at(d1, 1)

    def trusted(self, d1: float, loose: bool = False) -> float:
        """PSNR in dB that nearly all runs keep, or most of them (``benchmarks/fit.py``: STRICT,
        LOOSE)."""
        return self._at(d1, 3 if loose else 2)

    def _at(self, d1: float, column: int) -> float:
        x = [knot[0] for knot in self.knots]
        return float(np.interp(math.log10(max(d1, 1e-12)), x, [k[column] for k in self.knots]))


@dataclass(frozen=True)
class RiskTable:
    """What was measured on held-out pairs of one backbone (``benchmarks/calibrate.py``).

    ``peak`` is the range of the latent PSNR, ``guard`` turns the accumulated prediction error
    into an expected deviation, and ``ceiling`` is the largest D1 that was measured. ``kinds`` has
    the rows of every sampler class, ``+cfg`` and ``+schedule`` behind it where the donor's
    guidance scale or noise levels differ. ``extra`` dB are asked for on top.
    """

    name: str
    architecture: str
    peak: float | None
    guard: float
    ceiling: float
    kinds: dict[str, tuple[Row, ...]]
    calibrated: bool = True
    extra: float = 0.0

    def trusted_db(self, row: Row, d1: float, loose: bool = False) -> float:
        """Deviation a plan is trusted to keep, in dB."""
        return row.trusted(d1, loose) - self.extra

    def choose(
        self, kind: str, total: int, d1: float, budget_db: float, loose: bool = False
    ) -> Row | None:
        """The row with the fewest evaluations that keeps the budget, or None.

        A plan that evaluates more than ``WORTH`` of the run is not worth its risk: there fewer
        steps alone come nearly as close.
        """
        if not d1 <= self.ceiling:
            return None
        fit = [
            row
            for row in self.kinds.get(kind, ())
            if row.evaluations <= WORTH * total and self.trusted_db(row, d1, loose) >= budget_db
        ]
        return min(fit, key=lambda r: (r.evaluations, -self.trusted_db(r, d1, loose)), default=None)

    def refusal(
        self, kind: str, total: int, d1: float, budget_db: float, loose: bool = False
    ) -> str:
        """Why ``choose`` found nothing."""
        if not d1 <= self.ceiling:
            return f"D1 {d1:.3g} is beyond {self.ceiling:g}, the largest that was measured"
        rows = [r for r in self.kinds.get(kind, ()) if r.evaluations <= WORTH * total]
        if not rows:
            return f"D1 {d1:.3g}; no plan was measured for {kind!r} runs of {total} evaluations"
        best = max(self.trusted_db(row, d1, loose) for row in rows)
        return (
            f"D1 {d1:.3g}; the best plan is trusted to keep {best:.1f} dB of the {budget_db:g} dB "
            "asked for"
        )


@cache
def _tables() -> dict[str, RiskTable]:
    found = {}
    for file in sorted(Path(__file__).with_name("risk_tables").iterdir()):
        if file.suffix == ".json":
            data = json.loads(file.read_text())
            kinds = {
                kind: tuple(Row(n, late, tuple(map(tuple, knots))) for n, late, knots in rows)
                for kind, rows in data["kinds"].items()
            }
            table = RiskTable(
                data["name"],
                data["architecture"],
                data["peak"],
                data["guard"],
                data["ceiling"],
                kinds,
            )
            found[table.architecture] = table
    return found


def table_for(architecture: str) -> RiskTable:
    """The table of a backbone; one without its own borrows the embedded Wan's, with a margin."""
    tables = _tables()
    if architecture in tables:
        return tables[architecture]
    base = next(t for t in tables.values() if t.name == "wan-tiny")
    return RiskTable(
        f"borrowed from {base.name}",
        architecture,
        None,
        base.guard,
        base.ceiling,
        base.kinds,
        calibrated=False,
        extra=UNCALIBRATED_MARGIN,
    )


def to_db(mean_square: float, peak: float) -> float:
    """Latent PSNR in dB of a mean squared deviation; minus infinity when that is not finite."""
    if not mean_square < math.inf:
        return -math.inf
    return 10 * math.log10(peak * peak / max(mean_square, 1e-12))


class Guard:
    """Adds up what the evaluations measured of the predictions between them.

    In a gap of linear extrapolation the error grows about quadratically to the value ``e`` met
    at its end, so that the gap moves the latent by about ``span * e / 3``; gaps add up in
    squares. ``factor`` is the measured ratio of the final deviation to that sum.
    """

    def __init__(self, budget_db: float, peak: float, factor: float):
        self.allowed = peak * peak * 10 ** (-budget_db / 10)
        self.peak = peak
        self.factor = factor
        self.spent = 0.0

    def add(self, span: float, error: float, progress: float) -> str:
        """A gap of ``span`` (sigma) that ended in a mean squared prediction error ``error``, at
        ``progress`` (0..1) of the way down in sigma.

        Returns ``go``, ``tighten`` (more is spent than is due by now) or ``stop`` (all is spent).
        """
        step = span * math.sqrt(error) / 3
        self.spent += (self.factor * step) ** 2 if math.isfinite(step) else math.inf
        if not self.spent <= self.allowed:
            return "stop"
        due = SLACK + (1 - SLACK) * min(max(progress, 0.0), 1.0)
        return "tighten" if self.spent > due * self.allowed else "go"

    @property
    def expected_db(self) -> float:
        return to_db(self.spent, self.peak)
