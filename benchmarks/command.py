"""What the commands ``benchmarks.session`` and ``benchmarks.ablation`` share: options and files."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from carnator.demo.families import FAMILIES


def options(description: str) -> argparse.ArgumentParser:
    """A parser with the options that both have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="as little as shows anything")
    parser.add_argument("--backbone", choices=(*FAMILIES, "all"), default="all")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of the bundled ones")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser


def command(name: str) -> str:
    """The command that is running, for its results."""
    return " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]])


def save(path: Path, data: dict) -> None:
    """Write results as JSON, what holds no further dict or list on one line."""
    flat = re.sub(
        r"\{[^{}\[\]]*\}", lambda m: " ".join(m.group().split()), json.dumps(data, indent=1)
    )
    path.write_text(flat + "\n", encoding="utf-8")
