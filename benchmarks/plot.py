"""Plots of benchmark results (matplotlib, a development dependency)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

STYLE = {
    "plain": ("plain fewer steps", "#9a9a9a", "o"),
    "own": ("own linear extrapolation", "#4878a8", "s"),
    "donor": ("donor + difference", "#d8702a", "D"),
}


def fidelity_plot(
    summary: dict, counts: Sequence[int], hits: Sequence[tuple[int, float]], path: Path
) -> None:
    """Mean PSNR over evaluations of the three methods on the accepted pairs, and what Carnator
    chose and reached for each of them (``hits``: evaluations, dB)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            "The plot needs matplotlib: install requirements-dev.txt, or leave --plot away."
        ) from error
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for method, (label, color, marker) in STYLE.items():
        curve = summary["accepted_curves"][method]
        points = [(n, curve[n]) for n in counts if curve[n] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, color=color, marker=marker)
    if hits:
        x, y = zip(*hits, strict=True)
        axes.scatter(
            x, y, s=14, color="#202020", label="Carnator's own choice, each pair", zorder=3
        )
    axes.axhline(summary["floor_db"], color="#cccccc", linewidth=1, zorder=0)
    title = f"{summary['accepted']} of {summary['pairs']} held-out tweaks accepted"
    axes.set(
        title=f"{title} ({summary['preset']})",
        xlabel="model evaluations (dense run: 30)",
        ylabel="PSNR against the own dense run (dB)",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
