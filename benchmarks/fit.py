"""Fits a backbone's risk table to the rows of ``benchmarks.calibrate``.

``python -m benchmarks.fit rows.json --name wan-tiny --out carnator/risk_tables/wan_tiny.json``

Per sampler class, spacing and number of evaluations: expected dB and the downside deviation from it
over log10 D0, made monotone, so that acceptance is monotone in D0 and in the budget. A third of the
pairs is kept out of the fit: on them the printed share of broken promises is measured.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from carnator.risk import PRESETS, WORTH, RiskTable, Row

MAX_D0 = 0.3  # pairs beyond it are refused, and so left out of the fit
FEWEST = 10  # pairs a row is fitted to
GRID_STEP, BANDWIDTH = 0.25, 0.25  # in log10 D0
GUARD_QUANTILE = 0.5  # of final deviation over the guard's sum


def kept_out(row: dict) -> bool:
    """Every third pair, by its seed, tests the fit instead of making it."""
    return row["seed"] % 3 == 0


def usable(row: dict) -> bool:
    """Changes of words and weights under one schedule and CFG. For other CFGs the same D0 comes
    with less deviation, for other step counts with more; both are only judged by the table."""
    return row["log10_d0"] <= math.log10(MAX_D0) and row["change"] not in ("cfg", "steps")


def knots(rows: list[dict]) -> tuple[tuple[float, float, float], ...]:
    """Expected dB and the downside deviation from it over log10 D0: kernel means (Nadaraya 1964,
    Watson 1964), made monotone by pooling (Ayer et al. 1955), so that a larger D0 never promises
    more."""
    x = np.array([r["log10_d0"] for r in rows])
    y = np.array([r["psnr_db"] for r in rows])
    grid = np.arange(
        GRID_STEP * math.floor(max(x.min(), -4) / GRID_STEP), math.log10(MAX_D0), GRID_STEP
    )
    weight = np.exp(-0.5 * ((grid[:, None] - x) / BANDWIDTH) ** 2) + 1e-9
    weight /= weight.sum(1, keepdims=True)
    mean = falling(weight @ y)
    around = np.interp(x, grid, mean)
    spread = np.maximum.accumulate(np.sqrt(weight @ np.minimum(y - around, 0) ** 2))
    columns = (np.round(c, 2).tolist() for c in (grid, mean, spread))
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


def judge(table: RiskTable, kind: str, rows: list[dict], budget: float) -> dict[str, float]:
    """How acceptance does on pairs the fit has not seen: share accepted, evaluations, mean dB,
    share of accepted ones below the budget, share of refused ones that would have kept it."""
    pairs: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        pairs[(row["donor"], row["target"], row["seed"], row["total"])].append(row)
    got, counts, wasted, refused = [], [], 0, 0
    for group in pairs.values():
        total, d0 = group[0]["total"], 10 ** group[0]["log10_d0"]
        chosen = table.choose(kind, total, d0, budget)
        wanted = (chosen.evaluations, chosen.late) if chosen else None
        hit = next((r for r in group if (r["evaluations"], r["late"]) == wanted), None)
        if hit is None:
            refused += 1
            wasted += any(
                r["psnr_db"] >= budget for r in group if r["evaluations"] <= WORTH * total
            )
            continue
        got.append(hit["psnr_db"])
        counts.append(hit["evaluations"])
    return {
        "pairs": len(pairs),
        "accepted": len(got) / max(1, len(pairs)),
        "evaluations": float(np.mean(counts)) if counts else math.nan,
        "mean_db": float(np.mean(got)) if got else math.nan,
        "min_db": min(got, default=math.nan),
        "below_budget": float(np.mean([g < budget for g in got])) if got else math.nan,
        "refused_but_fine": wasted / max(1, refused),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    data = json.loads(options.rows.read_text(encoding="utf-8"))
    rows = [r for r in data["rows"] if usable(r)]
    made = [r for r in rows if not kept_out(r)]
    kinds = {
        k: fit([r for r in made if r["class"] == k]) for k in sorted({r["class"] for r in made})
    }
    guard = guard_factor(made, data["peak"])
    table = RiskTable(options.name, data["architecture"], data["peak"], guard, MAX_D0, kinds)
    for kind in kinds:
        test = [r for r in data["rows"] if r["class"] == kind and kept_out(r)]
        for preset, budget in PRESETS.items():
            for what, some in (
                ("words, weights", [r for r in test if r["change"] not in ("cfg", "steps")]),
                ("cfg, steps", [r for r in data["rows"] if r["change"] in ("cfg", "steps")]),
            ):
                seen = judge(table, kind, [r for r in some if r["class"] == kind], budget)
                print(kind, preset, what, " ".join(f"{k}={v:.3g}" for k, v in seen.items()))
    lists = {kind: [[r.evaluations, r.late, r.knots] for r in rows] for kind, rows in kinds.items()}
    text = json.dumps(
        {
            "name": table.name,
            "architecture": table.architecture,
            "peak": table.peak,
            "guard": table.guard,
            "ceiling": table.ceiling,
            "kinds": lists,
        },
        indent=1,
    )
    options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
