"""Plots of benchmark results (matplotlib, a development dependency)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

STYLE = {
    "plain": ("plain fewer steps", "#9a9a9a", "o"),
    "own": ("own linear extrapolation", "#4878a8", "s"),
    "donor": ("donor + difference", "#d8702a", "D"),
}


def fidelity_plot(summary: dict, counts: Sequence[int], path: Path) -> None:
    """PSNR over evaluations for the three methods: all pairs, and the accepted ones."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            "The plot needs matplotlib: install requirements-dev.txt, or leave --plot away."
        ) from error
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    panels = (
        (left, "mean_curves", f"all {summary['pairs']} held-out tweaks"),
        (right, "accepted_curves", f"{summary['accepted']} accepted ({summary['preset']})"),
    )
    for axes, key, title in panels:
        for method, (label, color, marker) in STYLE.items():
            points = [(n, summary[key][method][n]) for n in counts]
            points = [(n, db) for n, db in points if db is not None]
            axes.plot(
                *zip(*points, strict=True) if points else ([], []),
                label=label,
                color=color,
                marker=marker,
            )
        axes.axhline(summary["floor_db"], color="#cccccc", linewidth=1, zorder=0)
        axes.set(title=title, xlabel="model evaluations (dense run: 30)")
        axes.grid(alpha=0.3)
    left.set_ylabel("PSNR against the own dense run (dB)")
    left.legend(frameon=False)
    figure.savefig(path, dpi=120)
