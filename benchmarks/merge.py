"""Joins results of one benchmark that were measured backbone by backbone.

``python -m benchmarks.merge OUT.json PART.json ... [--plot PATH]``

A later part's backbones replace an earlier one's. The commands of all parts are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import bars, command, fidelity
from .plot import fidelity_plot

BY_BACKBONE = ("summary", "pairs", "sessions")


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result from several. Raises ValueError if they are not of the same benchmark."""
    keys = {frozenset(part) for part in parts}
    if len(keys) != 1 or not {"command", "summary"} <= set(parts[0]):
        raise ValueError("The files are not results of one benchmark: their keys differ.")
    out: dict[str, Any] = {"command": " ; ".join(part["command"] for part in parts)}
    for key in BY_BACKBONE:
        if key in parts[0]:
            out[key] = {name: value for part in parts for name, value in part[key].items()}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    try:
        data = merged([json.loads(p.read_text(encoding="utf-8")) for p in options.parts])
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if "pairs" in data:
        fidelity.save(options.out, data)
        if options.plot:
            fidelity_plot(data["summary"], data["pairs"], options.plot)
        return
    command.save(options.out, data)
    if options.plot:
        draw = bars.session_plot if "sessions" in data else bars.ablation_plot
        draw(data["summary"], options.plot)


if __name__ == "__main__":
    main()
