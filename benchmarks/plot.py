"""Plots of benchmark results (matplotlib, a development dependency)."""

from __future__ import annotations

from pathlib import Path

from .summary import LABELS

STYLE = {  # colour, marker
    "carnator": ("#202020", "o"),
    "donor": ("#d8702a", "D"),
    "plain": ("#9a9a9a", "o"),
    "own": ("#4878a8", "s"),
    "easycache": ("#2f8f5b", "^"),
    "lazycache": ("#86b875", "v"),
    "teacache": ("#17becf", "P"),
    "nirvana": ("#b23a6f", "x"),
    "vllm_omni": ("#e08fb3", "+"),
    "cacheseek": ("#8c564b", "1"),
    "redi": ("#8a63b8", "*"),
}
PANELS = (("psnr_db", "mean"), ("p10_db", "tenth percentile"))


def fidelity_plot(summaries: dict, pairs: dict, path: Path) -> None:
    """PSNR over evaluations on the accepted pairs, mean and tenth percentile: a row of panels for
    each backbone. ``pairs`` are the measured pairs, or what JSON made of them; Carnator's own
    choice for each is a dot."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            "The plot needs matplotlib: install requirements-dev.txt, or leave --plot away."
        ) from error
    rows, columns = len(summaries), len(PANELS)
    figure = Figure(figsize=(6.4 * columns, 4.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for line, (name, summary) in zip(grid, summaries.items(), strict=True):
        for axes, (statistic, title) in zip(line, PANELS, strict=True):
            for method, (color, marker) in STYLE.items():
                curve = summary["accepted_curves"].get(method, {})
                points = sorted((s["evaluations"], s[statistic]) for s in curve.values())
                if points:
                    axes.plot(
                        *zip(*points, strict=True),
                        label=LABELS[method],
                        color=color,
                        marker=marker,
                        linewidth=2.2 if method == "carnator" else 1.2,
                    )
            axes.axhline(summary["floor_db"], color="#cccccc", linewidth=1, zorder=0)
            axes.set(
                title=f"{name}: {title} of {summary['accepted']} accepted of {summary['pairs']} "
                f"tweaks ({summary['preset']})",
                xlabel="model evaluations (dense run: 30)",
                ylabel="PSNR against the own dense run (dB)",
            )
            axes.grid(alpha=0.3)
        hits = [own for own in map(own_point, pairs[name]) if own is not None]
        if hits:
            line[0].scatter(
                *zip(*hits, strict=True), s=12, color="#606060", alpha=0.6, zorder=3,
                label="Carnator's own choice, each pair",
            )  # fmt: skip
        if summary["accepted_curves"]:
            line[0].legend(frameon=False, fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)


def own_point(pair: object) -> tuple[float, float] | None:
    """Evaluations and dB of Carnator's own run of an accepted pair, else None."""
    data = pair if isinstance(pair, dict) else pair.as_dict()  # type: ignore[attr-defined]
    if data["decision"] not in ("hit", "exact"):
        return None
    return data["own"][1], data["own"][2]
