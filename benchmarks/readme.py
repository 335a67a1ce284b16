"""The tables of figures in README.md, made from the results of record.

``python -m benchmarks.readme`` writes them between their markers; a test fails when README and
results drift apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carnator.demo.families import FAMILIES

from .summary import LABELS, show

ROOT = Path(__file__).parents[1]
RESULTS, README = ROOT / "benchmarks" / "results", ROOT / "README.md"
START, END = "<!-- figures: python -m benchmarks.readme -->", "<!-- end of figures -->"

Row = tuple[str, Callable[[dict[str, Any]], str]]


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def rival(s: dict[str, Any]) -> str:
    """The best competitor's tenth percentile where its mean reaches 31 dB."""
    p10 = s["p10_db"]
    return f"{show(p10['carnator'])} ({show(p10['competitor'])})"


FIDELITY: list[Row] = [
    ("held-out changes accepted under `balanced`", lambda s: f"{s['accepted']} of {s['pairs']}"),
    ("their evaluations, against 30", lambda s: f"{s['evaluation_ratio']:.2f}x fewer"),
    ("their PSNR against their own dense runs (dB)", lambda s: show(s["accepted_psnr_db"])),
    ("accepted, but below the 31 dB asked for", lambda s: percent(s["accepted_below_floor"])),
    ("refused, but would have been fine", lambda s: percent(s["refused_but_fine"], 0)),
    ("plain steps needed for the same PSNR", lambda s: f"{s['plain_ratio']:.2f}x as many"),
    ("at 31 dB mean: the best competitor's evaluations over Carnator's",
     lambda s: f"{s['evaluation_ratio_at_31db']:.2f} ({LABELS[s['best_competitor']]})"),
    ("tenth percentile in dB (the best competitor's where its mean is 31 dB)", rival),
    ("leakage of the earlier prompt, over the dense runs'",
     lambda s: percent(s["leakage_over_dense"])),
    ("attributes right (dense)",
     lambda s: f"{percent(s['attributes_right'])} ({percent(s['dense_attributes_right'])})"),
]  # fmt: skip
SESSION: list[Row] = [
    ("fixed-seed sessions of 12 requests, against dense",
     lambda s: f"{s['fixed_seed_speedup']:.2f}x faster"),
    ("their changed requests that reused something", lambda s: percent(s["tweak_hit_rate"], 0)),
    ("sessions with unrelated prompts in between, against dense",
     lambda s: f"{-100 * s['mixed_slowdown']:.0f} % less time"
     if s["mixed_slowdown"] < 0 else f"{100 * s['mixed_slowdown']:.1f} % more time"),
    ("hits of all sessions below the 27 dB of `fast`", lambda s: percent(s["hits_below_floor"])),
]  # fmt: skip


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def by_backbone(name: str, rows: list[Row]) -> list[str]:
    """A table with a column for each backbone; its first row names the command."""
    data = results(name)["summary"]
    names = [n for n in FAMILIES if n in data]
    lines = [
        f"| `python -m benchmarks.{name}` | " + " | ".join(FAMILIES[n].title for n in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for title, figure in rows:
        lines.append(f"| {title} | " + " | ".join(figure(data[n]) for n in names) + " |")
    return lines


def single() -> list[str]:
    """Figures of the tiny Wan alone, and of sparse attention at real width."""
    joint = results("joint")["summary"]
    sparse = {r["density"]: r for r in results("attention")["rows"] if r["backend"] == "gather"}
    shares = " and ".join(
        f"{r['ratio_to_dense']:.2f}x at density {d:.2f}" for d, r in sparse.items()
    )
    demo, cases = results("demo")["summary"], results("overhead")["summary"]["cases"]
    outside = {c["case"]: c["outside_percent"] for c in cases}
    costs = [f"{outside[case]:.1f} %" for case in outside]
    return [
        "| else, on the tiny Wan where nothing is said | | command |",
        "|---|---|---|",
        f"| a creator's session under `fast` | {demo['word_tweaks_accepted']} of "
        f"{demo['word_tweaks']} word tweaks are hits: {demo['evaluation_ratio']:.1f}x fewer "
        f"evaluations, {demo['speed_up']:.1f}x less time, {demo['psnr_db']:.1f} dB | "
        '`make demo ARGS="--json benchmarks/results/demo.json"` |',
        "| what a miss costs outside the model | "
        f"{costs[0]} (empty store), {costs[1]} (eight donors refused); in ComfyUI {costs[2]} and "
        f"{costs[3]} | `python -m benchmarks.overhead --comfy` |",
        "| block-sparse attention alone, 8,192 tokens, 12 heads of 128, against dense | "
        f"{shares} | `python -m benchmarks.attention --tokens 8192 --densities 0.15 0.3` |",
        "| a Wan of real width and two layers, 8,192 tokens, 7 of 30 steps evaluated (times "
        "composed of single evaluations, attention local by construction) | "
        f"trajectory reuse alone {joint['trajectory_only']:.2f}x, sparse attention alone "
        f"{joint['sparse_only']:.2f}x, both {joint['speedup']:.2f}x | "
        "`python -m benchmarks.joint` |",
    ]


def figures() -> str:
    """The text between the markers."""
    tables = (("fidelity", FIDELITY), ("session", SESSION))
    parts = [by_backbone(n, rows) for n, rows in tables if (RESULTS / f"{n}.json").is_file()]
    parts.append(single())
    return "\n\n".join("\n".join(part) for part in parts)


def replaced(readme: str, text: str) -> str:
    """README with other figures. Raises ValueError where a marker is missing."""
    pattern = re.compile(f"({re.escape(START)}\n).*?({re.escape(END)})", re.DOTALL)
    if not pattern.search(readme):
        raise ValueError(f"README.md lacks the markers {START!r} and {END!r}.")
    return pattern.sub(lambda m: m[1] + text + "\n" + m[2], readme)


def main() -> None:
    readme = README.read_text(encoding="utf-8")
    README.write_text(replaced(readme, figures()), encoding="utf-8")


if __name__ == "__main__":
    main()
