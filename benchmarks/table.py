"""The table that ``benchmarks.fidelity`` shows on the screen."""

from __future__ import annotations

from .summary import LABELS, TARGET_DB, Stats, at_db, operating_point, show

COLUMNS = ("evaluations", "psnr_db", "p10_db", "min_db", "reached", "ssim", "attributes", "leakage")
FORMS = (".1f", ".1f", ".1f", ".1f", ".0%", ".3f", ".2f", ".2f")


def line(label: str, found: Stats | None, first: str = "") -> str:
    cells = [show(found[c] if found else None, f) for c, f in zip(COLUMNS, FORMS, strict=True)]
    return f"{label:<28}{first:>9}" + "".join(f"{cell:>8}" for cell in cells)


def text(name: str, summary: dict) -> str:
    """A backbone's summary for a terminal."""
    head = "".join(
        f"{c:>8}" for c in ("evals", "mean", "p10", "min", ">=31", "SSIM", "right", "leak")
    )
    lines = [
        f"== {name}: {summary['accepted']} of {summary['pairs']} tweaks accepted under "
        f"{summary['preset']} ({summary['floor_db']:g} dB)",
        f"{'over the accepted pairs':<28}{'at 31 dB':>9}{head}   (cheapest setting of 31 dB mean)",
    ]
    for method, label in LABELS.items():
        curve = summary["accepted_curves"].get(method)
        if curve:
            point = operating_point(curve, TARGET_DB)
            lines.append(line(label, point[1] if point else None, show(at_db(curve, TARGET_DB))))
    lines.append("as published or shipped")
    lines.append(line(f"Carnator, {summary['preset']}", summary["accepted_at_preset"]))
    lines += [line(LABELS[m], found) for m, found in summary["published"].items()]
    for kind, group in summary["kinds"].items():
        lines.append(
            f"{kind}: {group['accepted']} of {group['pairs']} accepted (mean D1 "
            f"{show(group['mean_d1'], '.3g')}), {show(group['accepted_psnr_db'])} dB, lowest "
            f"{show(group['accepted_lowest_db'])}, {show(group['accepted_evaluations'])} "
            "evaluations"
        )
    p10, best = summary["p10_db"], summary["best_competitor"]
    lines.append(
        f"At 31 dB mean the best competitor ({LABELS.get(best, 'none')}) needs "
        f"{show(summary['evaluation_ratio_at_31db'], '.2f')} times Carnator's evaluations; p10 "
        f"{show(p10['carnator'])} dB against {show(p10['competitor'])}; leakage "
        f"{show(summary['leakage_over_dense'], '+.3f')} over dense; "
        f"{show(summary['accepted_below_floor'], '.1%')} of the accepted below the floor; "
        f"{show(summary['refused_but_fine'], '.1%')} of the refused would have kept it with "
        f"{summary['refused_judged_at']:g} evaluations"
    )
    words, settings = summary["words"], summary["settings"]
    lines.append(
        f"Ratio at 31 dB of the tenth percentile instead of the mean: "
        f"{show(summary['evaluation_ratio_at_31db_p10'], '.2f')}. Word tweaks alone "
        f"({words['accepted']}): {show(words['evaluation_ratio_at_31db'], '.2f')} and "
        f"{show(words['evaluation_ratio_at_31db_p10'], '.2f')}; changed settings alone "
        f"({settings['accepted']}): {show(settings['evaluation_ratio_at_31db'], '.2f')} and "
        f"{show(settings['evaluation_ratio_at_31db_p10'], '.2f')}"
    )
    lines.append(
        f"Hits make {show(summary['evaluation_ratio'], '.2f')}x fewer evaluations than dense "
        f"runs; to match each, plain fewer steps needs {show(summary['plain_ratio'], '.2f')}x, "
        f"own extrapolation {show(summary['own_ratio'], '.2f')}x as many"
    )
    return "\n".join(lines)
