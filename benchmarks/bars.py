"""Plots of ``benchmarks.session`` and ``benchmarks.ablation`` (matplotlib, a development
dependency)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DENSE, OURS, EDGE = "#9a9a9a", "#d8702a", "#202020"
GROWTH = {
    "dense_ms": ("dense request", DENSE, "o"),
    "miss_ms": ("miss", EDGE, "s"),
    "hit_ms": ("hit", OURS, "D"),
    "match_ms": ("matching", "#4878a8", "^"),
    "match_after_write_ms": ("matching after a write", "#8a63b8", "v"),
    "first_match_ms": ("first matching of a process", "#2f8f5b", "x"),
}


def figure_of(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes [rows, columns], each ``width`` by ``height`` inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            "The plot needs matplotlib: install requirements-dev.txt, or leave --plot away."
        ) from error
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def session_plot(summaries: dict[str, Any], path: Path) -> None:
    """Time of all sessions of a kind, dense and with Carnator; requests and matching over the
    number of records. A row for each backbone."""
    figure, grid = figure_of(len(summaries), 2, 6.4, 4.0)
    for (sessions, growth), (name, summary) in zip(grid, summaries.items(), strict=True):
        kinds = summary["kinds"]
        places = range(len(kinds))
        for shift, key, label, color in (
            (-0.2, "dense_seconds", "dense", DENSE),
            (0.2, "seconds", "Carnator, everything counted", OURS),
        ):
            heights = [k[key] / k["requests"] for k in kinds.values()]
            sessions.bar([p + shift for p in places], heights, 0.4, label=label, color=color)
        for place, k in zip(places, kinds.values(), strict=True):
            sessions.annotate(
                f"{k['speedup']:.2f}x",
                (place + 0.2, k["seconds"] / k["requests"]),
                ha="center",
                va="bottom",
            )
        sessions.margins(y=0.12)
        sessions.set_xticks(list(places), list(kinds))
        sessions.set(title=f"{name}: sessions", ylabel="seconds a request")
        sessions.legend(frameon=False, fontsize=8)
        for key, (label, color, marker) in GROWTH.items():
            points = [(r["records"], r[key]) for r in summary["growth"] if r[key] is not None]
            if points:
                growth.plot(*zip(*points, strict=True), label=label, color=color, marker=marker)
        growth.set(
            title=f"{name}: a growing store",
            xlabel="records in the store",
            ylabel="milliseconds",
            xscale="log",
            yscale="log",
        )
        growth.grid(alpha=0.3)
        if summary["growth"]:
            growth.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def ablation_plot(summaries: dict[str, Any], path: Path) -> None:
    """What each change costs or gains at ten evaluations, and which shortlists hold the best
    donor. A row for each backbone."""
    figure, grid = figure_of(len(summaries), 2, 8.0, 7.0)
    for (changes, recall), (name, summary) in zip(grid, summaries.items(), strict=True):
        heads: set[str] = set()
        rows = []
        for row in summary["rows"]:
            if row["part"] in heads:
                rows.append(row)
            heads.add(row["part"])
        labels = [f"{r['part']}: {r['variant']}" for r in rows]
        changes.barh(
            labels,
            [r["10"]["delta_db"] for r in rows],
            xerr=[r["10"]["delta_error_db"] for r in rows],
            color=OURS,
            ecolor=EDGE,
        )
        changes.axvline(0, color=EDGE, linewidth=1)
        changes.set(
            title=f"{name}: against the shipped form, 10 evaluations",
            xlabel="mean difference of PSNR (dB), standard error",
        )
        found = summary["signature"]
        recall.barh([r["shortlist"] for r in found], [r["recall"] for r in found], color="#4878a8")
        recall.set(
            title=f"{name}: donor of least D1 among four shortlisted",
            xlabel="share of targets",
            xlim=(0, 1),
        )
        for axes in (changes, recall):
            axes.invert_yaxis()
            axes.tick_params(axis="y", labelsize=7)
            axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=110)
