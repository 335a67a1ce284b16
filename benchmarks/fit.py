"""Fits a backbone's risk table to the rows of ``benchmarks.calibrate``.

``python -m benchmarks.fit rows.json --name wan-tiny --out carnator/risk_tables/wan_tiny.json``

Per sampler class and kind of change, spacing and number of evaluations: the mean dB over log10 D1,
and what is trusted strictly and loosely, two low quantiles of it; all monotone, so that acceptance
is monotone in D1 and in the budget. How the presets then do on pairs the fit has not seen is
measured by cross-validation and printed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from carnator import risk
from carnator.risk import PRESETS, WORTH, RiskTable, Row

MAX_D1 = 1.0  # pairs beyond it are refused, and so left out of the fit
FEWEST = 10  # pairs a row is fitted to
GRID_STEP, BANDWIDTH = 0.25, 0.25  # in log10 D1
GUARD_QUANTILE = 0.5  # of final deviation over the guard's sum
FOLDS = 4
# Quantiles of the dB reached; lower ones ask for more pairs. Where CFG or the schedule changed, D1
# says less, and the strict one is lower. The online guard mends part of what is left.
STRICT, STRICT_CHANGED, LOOSE = 0.15, 0.08, 0.3
PAIR = ("donor", "target", "seed", "total", "steps", "shift", "cfg", "change")


def knots(rows: list[dict]) -> tuple[tuple[float, ...], ...]:
    """Mean and trusted dB over log10 D1: kernel means (Nadaraya 1964, Watson 1964) and quantiles,
    made monotone by pooling (Ayer et al. 1955), so that a larger D1 never promises more."""
    strict = STRICT_CHANGED if "+" in rows[0]["class"] else STRICT
    x = np.array([r["log10_d1"] for r in rows])
    y = np.array([r["psnr_db"] for r in rows])
    lowest = GRID_STEP * math.floor(max(np.quantile(x, 0.05), -5) / GRID_STEP)
    grid = np.arange(lowest, math.log10(MAX_D1) + GRID_STEP / 2, GRID_STEP)
    weight = np.exp(-0.5 * ((grid[:, None] - x) / BANDWIDTH) ** 2) + 1e-9
    weight /= weight.sum(1, keepdims=True)
    order = np.argsort(y)
    reached = np.cumsum(weight[:, order], axis=1)
    middles = reached - weight[:, order] / 2
    low = [falling(np.array([np.interp(q, m, y[order]) for m in middles])) for q in (strict, LOOSE)]
    columns = (np.round(c, 2).tolist() for c in (grid, falling(weight @ y), *low))
    return tuple(zip(*columns, strict=True))


def falling(values: np.ndarray) -> np.ndarray:
    """The nearest non-rising sequence: neighbours that rise are pooled to their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        block = (float(value), 1)
        while blocks and blocks[-1][0] < block[0]:
            mean, size = blocks.pop()
            block = ((mean * size + block[0] * block[1]) / (size + block[1]), size + block[1])
        blocks.append(block)
    return np.concatenate([[mean] * size for mean, size in blocks])


def fit(rows: list[dict]) -> tuple[Row, ...]:
    """One row per spacing and number of evaluations."""
    groups: dict[tuple[int, float], list[dict]] = defaultdict(list)
    for row in rows:
        groups[(row["evaluations"], row["late"])].append(row)
    return tuple(
        Row(n, late, knots(group))
        for (n, late), group in sorted(groups.items())
        if len(group) >= FEWEST
    )


def guard_factor(rows: list[dict], peak: float) -> float:
    """Final deviation over the guard's sum, as a quantile over all rows that spent anything."""
    ratios = [
        math.sqrt(peak**2 * 10 ** (-r["psnr_db"] / 10) / r["spent"])
        for r in rows
        if r["spent"] > 1e-12
    ]
    return round(float(np.quantile(ratios, GUARD_QUANTILE)), 3)


@dataclass
class Judged:
    """How acceptance did on pairs: PSNR and evaluations of the accepted ones, and how many of the
    refused ones some plan would have kept within the budget."""

    psnr_db: list[float] = field(default_factory=list)
    evaluations: list[int] = field(default_factory=list)
    broken: int = 0
    refused: int = 0
    wasted: int = 0

    def add(
        self, rows: tuple[Row, ...], pairs: list[list[dict]], budget: float, loose: bool
    ) -> None:
        table = RiskTable("", "", None, 1.0, MAX_D1, {"": rows})
        for group in pairs:
            total, d1 = group[0]["total"], 10 ** group[0]["log10_d1"]
            chosen = table.choose("", total, d1, budget, loose)
            wanted = (chosen.evaluations, chosen.late) if chosen else None
            hit = next((r for r in group if (r["evaluations"], r["late"]) == wanted), None)
            if hit is None:
                self.refused += 1
                self.wasted += any(
                    r["psnr_db"] >= budget for r in group if r["evaluations"] <= WORTH * total
                )
            else:
                self.psnr_db.append(hit["psnr_db"])
                self.evaluations.append(hit["evaluations"])
                self.broken += hit["psnr_db"] < budget

    def text(self) -> str:
        accepted = len(self.psnr_db)
        if not accepted:
            return f"none of {self.refused} accepted, {self.wasted} would have been fine"
        return (
            f"{accepted} of {accepted + self.refused} accepted, {np.mean(self.evaluations):.1f} "
            f"evaluations, {np.mean(self.psnr_db):.1f} dB (lowest {min(self.psnr_db):.1f}), "
            f"{self.broken} below the budget; {self.wasted} refused would have been fine"
        )


def by_pair(rows: list[dict]) -> list[list[dict]]:
    pairs: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        pairs[tuple(row[k] for k in PAIR)].append(row)
    return list(pairs.values())


def crossed(rows: list[dict]) -> dict[str, Judged]:
    """Judge every pair, under every preset, by a fit to the folds it is not in."""
    out = {preset: Judged() for preset in PRESETS}
    pairs = by_pair(rows)
    for fold in range(FOLDS):
        made = fit([r for i, p in enumerate(pairs) if i % FOLDS != fold for r in p])
        for preset, how in out.items():
            how.add(made, pairs[fold::FOLDS], PRESETS[preset], preset in risk.LOOSE)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    data = json.loads(options.rows.read_text(encoding="utf-8"))
    rows = [r for r in data["rows"] if r["log10_d1"] <= math.log10(MAX_D1)]
    kinds = {}
    for kind in sorted({r["class"] for r in rows}):
        some = [r for r in rows if r["class"] == kind]
        for preset, how in crossed(some).items():
            print(f"{kind}, {preset}: {how.text()}")
        kinds[kind] = [[r.evaluations, r.late, r.knots] for r in fit(some)]
    text = json.dumps(
        {
            "name": options.name,
            "architecture": data["architecture"],
            "peak": data["peak"],
            "guard": guard_factor(rows, data["peak"]),
            "ceiling": MAX_D1,
            "kinds": kinds,
        },
        indent=1,
    )
    options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
