"""The figures of ``benchmarks.fidelity``: means over pairs, where curves meet, who is best."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from carnator.demo.host import STEPS
from carnator.risk import PRESETS

from .competitors import COMPETITORS
from .measured import CARNATOR, Measured, Point
from .pairs import WORDS

TARGET_DB = 31.0
LABELS = {
    CARNATOR: "Carnator",
    "donor": "donor + difference",
    **{c.name: c.label for c in COMPETITORS},
}
PUBLISHED = {c.name: c.published for c in COMPETITORS if c.published is not None}

Stats = dict[str, float | None]


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is known, or None."""
    known = [v for v in values if v is not None]
    return round(statistics.fmean(known), 4) if known else None


def low(values: Sequence[float]) -> float | None:
    """The tenth percentile, linear between neighbours."""
    return round(float(np.percentile(values, 10)), 3) if values else None


def stats(points: Sequence[Point]) -> Stats:
    """Mean, tenth percentile and minimum of one setting over several pairs; ``reached`` is the
    share of them that have 31 dB."""
    dbs, likeness = [p.psnr_db for p in points], [p.ssim for p in points]
    return {
        "evaluations": mean(p.evaluations for p in points),
        "reached": mean(float(x >= TARGET_DB) for x in dbs),
        "psnr_db": mean(dbs),
        "p10_db": low(dbs),
        "min_db": min(dbs, default=None),
        "clip_db": mean(p.clip_db for p in points),
        "ssim": mean(likeness),
        "p10_ssim": low(likeness),
        "min_ssim": min(likeness, default=None),
        "attributes": mean(p.attributes for p in points),
        "leakage": mean(p.leakage for p in points),
    }


def curves(group: Sequence[Measured]) -> dict[str, dict[float, Stats]]:
    """Statistics per method and knob over the pairs of a group that were all measured there."""
    out: dict[str, dict[float, Stats]] = {}
    for method in LABELS:
        by_knob: dict[float, list[Point]] = {}
        for m in group:
            for point in m.curves.get(method, ()):
                by_knob.setdefault(point.knob, []).append(point)
        whole = {k: stats(p) for k, p in by_knob.items() if len(p) == len(group)}
        if whole:
            out[method] = whole
    return out


def needed(curve: dict[float, float], psnr_db: float, total: float) -> float:
    """Evaluations a curve needs for a PSNR, interpolated linearly; ``total`` where it falls short.

    The curve (dB by evaluations) is taken as the best of all counts up to n. Where its first point
    already reaches the PSNR, that point counts.
    """
    best, before = -float("inf"), (0.0, 0.0)
    for n, db in sorted(curve.items()):
        best = max(best, db)
        if best >= psnr_db:
            if before[0] == 0 or best <= before[1]:
                return float(n)
            return before[0] + (n - before[0]) * (psnr_db - before[1]) / (best - before[1])
        before = (n, best)
    return float(total)


def best_at_each(points: Iterable[tuple[float, float]]) -> dict[float, float]:
    """dB by evaluations, the best where several settings need the same."""
    out: dict[float, float] = {}
    for n, db in points:
        out[n] = max(db, out.get(n, -float("inf")))
    return out


def at_db(curve: dict[float, Stats], psnr_db: float, statistic: str = "psnr_db") -> float:
    """Mean evaluations a method needs for a mean (or another statistic) of PSNR."""
    points = best_at_each((s["evaluations"], s[statistic]) for s in curve.values())  # type: ignore[misc]
    return round(needed(points, psnr_db, STEPS), 3)


def crossing(table: dict[str, dict[float, Stats]], statistic: str) -> dict:
    """Evaluations every method needs for 31 dB in a statistic, who of the competitors needs the
    fewest, and how often that is Carnator's and the fixed plan's."""
    rivals = {
        c.name: at_db(table[c.name], TARGET_DB, statistic) for c in COMPETITORS if c.name in table
    }
    best = min(rivals, key=rivals.__getitem__, default=None)
    ours, plan = (
        at_db(table[name], TARGET_DB, statistic) if name in table else None
        for name in (CARNATOR, "donor")
    )
    return {
        "best_competitor": best,
        "competitors": rivals,
        "carnator": ours,
        "donor": plan,
        "ratio": round(rivals[best] / ours, 3) if best and ours else None,
        "plan_ratio": round(rivals[best] / plan, 3) if best and plan else None,
    }


def part(hits: Sequence[Measured]) -> dict:
    """The ratios over some of the accepted pairs alone."""
    table = curves(hits)
    at_mean, at_low = (crossing(table, statistic) for statistic in ("psnr_db", "p10_db"))
    return {
        "accepted": len(hits),
        "best_competitor": at_mean["best_competitor"],
        "evaluation_ratio_at_31db": at_mean["ratio"],
        "best_competitor_p10": at_low["best_competitor"],
        "evaluation_ratio_at_31db_p10": at_low["ratio"],
    }


def operating_point(curve: dict[float, Stats], psnr_db: float) -> tuple[float, Stats] | None:
    """The cheapest setting whose mean PSNR reaches a number, with its statistics."""
    fit = [(k, s) for k, s in curve.items() if (s["psnr_db"] or 0) >= psnr_db]
    return min(fit, key=lambda item: item[1]["evaluations"] or 0, default=None)


def own_ratio(group: Sequence[Measured], method: str) -> float | None:
    """Evaluations a method needs to match each hit's own PSNR, over the hit's."""
    ratios = []
    for m in group:
        if m.own is None or method not in m.curves:
            continue
        points = best_at_each((p.evaluations, p.psnr_db) for p in m.curves[method])
        ratios.append(needed(points, m.own.psnr_db, STEPS) / m.own.evaluations)
    return mean(ratios)


def refused_but_fine(measured: Sequence[Measured], floor: float) -> tuple[float | None, float]:
    """Share of the refused pairs that a plan of the hits' median length would have kept above the
    floor, and that length: the next one the ``donor`` curve was measured at."""
    lengths = sorted(m.own.evaluations for m in measured if m.accepted and m.own)
    refused = [m for m in measured if not m.accepted]
    if not lengths or not refused:
        return None, 0.0
    median = statistics.median(lengths)
    counts = [p.knob for p in refused[0].curves["donor"]]
    judged = min((c for c in counts if c >= median), default=max(counts))
    reached = [
        next(p.psnr_db for p in m.curves["donor"] if p.knob == judged) >= floor for m in refused
    ]
    return mean(map(float, reached)), judged


def summarise(measured: Sequence[Measured], preset: str) -> dict:
    """The figures of one backbone; ``benchmarks.fidelity`` says what they mean."""
    floor = PRESETS[preset]
    hits = [m for m in measured if m.accepted]
    own = [m.own for m in hits if m.own]
    dense = [m.dense for m in hits if m.dense]
    table = curves(hits)
    at_mean, at_low = (crossing(table, statistic) for statistic in ("psnr_db", "p10_db"))
    best = at_mean["best_competitor"]
    point = operating_point(table[best], TARGET_DB) if best else None
    fine, judged = refused_but_fine(measured, floor)
    at_preset, leaked, base = (
        stats(own),
        mean(p.leakage for p in own),
        mean(p.leakage for p in dense),
    )
    below = mean(float(p.psnr_db < floor) for p in own)
    return {
        "preset": preset,
        "floor_db": floor,
        "pairs": len(measured),
        "accepted": len(hits),
        "best_competitor": best,
        "competitor_evaluations_at_31db": at_mean["competitors"],
        "evaluations_at_31db": at_mean["carnator"],
        "evaluation_ratio_at_31db": at_mean["ratio"],
        "plan_ratio_at_31db": at_mean["plan_ratio"],
        "at_31db_p10": at_low,
        "evaluation_ratio_at_31db_p10": at_low["ratio"],
        "words": part([m for m in hits if m.kind in WORDS]),
        "settings": part([m for m in hits if m.kind not in WORDS]),
        "p10_db": {
            "carnator": at_preset["p10_db"],
            "competitor": point[1]["p10_db"] if point else None,
            "competitor_knob": point[0] if point else None,
            "competitor_evaluations": point[1]["evaluations"] if point else None,
        },
        "leakage_over_dense": round(leaked - base, 4)
        if leaked is not None and base is not None
        else None,
        "accepted_below_floor": below,
        "below_floor_share": below,
        "refused_but_fine": fine,
        "refused_judged_at": judged,
        "plain_ratio": own_ratio(hits, "plain"),
        "own_ratio": own_ratio(hits, "own"),
        "evaluation_ratio": mean(STEPS / p.evaluations for p in own),
        "accepted_psnr_db": at_preset["psnr_db"],
        "accepted_lowest_db": at_preset["min_db"],
        "accepted_at_preset": at_preset,
        "attributes_right": at_preset["attributes"],
        "dense_attributes_right": mean(p.attributes for p in dense),
        "all_dense_attributes_right": mean(m.dense.attributes for m in measured if m.dense),
        "dense_leakage": base,
        "shown_donor_leakage": mean(m.shown.leakage for m in hits if m.shown),
        "published": {
            name: table[name][knob]
            for name, knob in PUBLISHED.items()
            if name in table and knob in table[name]
        },
        "accepted_curves": table,
        "all_curves": curves(measured),
        "kinds": {
            kind: of_kind([m for m in measured if m.kind == kind])
            for kind in dict.fromkeys(m.kind for m in measured)
        },
    }


def of_kind(group: Sequence[Measured]) -> dict:
    hits = [m.own for m in group if m.accepted and m.own]
    return {
        "pairs": len(group),
        "accepted": len(hits),
        "mean_d0": mean(m.d0 for m in group),
        "mean_d1": mean(m.d1 for m in group),
        "accepted_psnr_db": mean(p.psnr_db for p in hits),
        "accepted_lowest_db": min((p.psnr_db for p in hits), default=None),
        "accepted_evaluations": mean(p.evaluations for p in hits),
        "curves": curves(group),
    }


def show(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)
