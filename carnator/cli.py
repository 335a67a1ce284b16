"""The command line: the demo session, training of its backbone, and a look at a store.

Torch is imported inside the commands, so that ``--help`` and mistyped options answer at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .demo.session import Outcome

PRESETS = ("faithful", "balanced", "fast")
MIN_STEPS, MAX_STEPS = 6, 1000
HEADER = ("request", "decision", "evaluations", "seconds", "speed-up", "PSNR", "right", "why")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (0 done, 2 asked wrongly, 130 interrupted)."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        options.command(options)
    except (ValueError, OSError) as error:
        print(f"carnator: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("carnator: interrupted", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m carnator",
        description="Reuses the trajectory of an earlier video generation for a changed request.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="play a creator's session on the bundled tiny model")
    demo.set_defaults(command=run_demo)
    demo.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for the pictures")
    demo.add_argument("--json", type=Path, help="also write the results as JSON to this file")
    demo.add_argument("--preset", choices=PRESETS, default="balanced")
    demo.add_argument("--seed", type=_whole(0, 2**63), default=7)
    demo.add_argument("--steps", type=_whole(MIN_STEPS, MAX_STEPS), default=30)
    demo.add_argument("--cfg", type=_guidance, help="guidance scale")
    demo.add_argument("--quick", action="store_true", help="one word tweak, every run timed once")
    demo.add_argument("--store", type=Path, help="folder of the store (default: a temporary one)")
    demo.add_argument("--model", type=Path, help="checkpoint to use instead of the bundled one")
    training = demo.add_subparsers(metavar="train").add_parser(
        "train", help="train the demo's backbone"
    )
    training.set_defaults(command=run_train)
    training.add_argument("--backbone", choices=("wan",), default="wan")
    training.add_argument("--steps", type=_whole(1, 10**7), dest="train_steps", default=None)
    training.add_argument("--folder", type=Path, default=Path("training"), help="for checkpoints")
    training.add_argument("--out", type=Path, dest="train_out", help="file for the weights")
    store = commands.add_parser("store", help="look at a store, or empty it")
    store.set_defaults(command=run_store)
    store.add_argument("action", choices=("stat", "list", "clear"))
    store.add_argument("--store", type=Path, required=True, help="folder of the store")
    return top


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return read


def _guidance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 100")
    return value


def run_demo(options: argparse.Namespace) -> None:
    import torch
    from tqdm import tqdm

    from .demo import host, session, sheet
    from .demo.model import BUNDLED, EmbeddedModel
    from .store import Store

    torch.set_flush_denormal(True)
    model = EmbeddedModel.load(options.model or BUNDLED)
    make_folder(options.out, "--out")
    if options.json:
        make_folder(options.json.parent, "--json")
    wishes = session.wishes(options.seed, options.steps, options.cfg or host.CFG, options.quick)
    repeats = 1 if options.quick else 3
    with ExitStack() as stack:
        folder = options.store or stack.enter_context(tempfile.TemporaryDirectory())
        store = stack.enter_context(Store(folder))
        total = session.planned_steps(wishes, repeats)
        bar = stack.enter_context(tqdm(total=total, unit="evaluation", dynamic_ncols=True))
        outcomes = session.play(
            model,
            wishes,
            store,
            preset=options.preset,
            repeats=repeats,
            progress=bar.update,
            before=lambda wish: bar.set_description(wish.name, refresh=False),
        )
    summary = session.summary(outcomes)
    sheet.write_sheet(outcomes, options.out / "sheet.png")
    sheet.write_animation(outcomes, options.out / "session.gif")
    print(table(outcomes))
    print(closing(summary, options.preset))
    print(f"Pictures: {options.out / 'sheet.png'}, {options.out / 'session.gif'}")
    if options.json:
        data = {"requests": [o.as_dict() for o in outcomes], "summary": summary}
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def make_folder(path: Path, option: str) -> None:
    """Make a folder for results now, so that a long run does not end in an error."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"Cannot make the folder {path} ({error.strerror}): give {option} another place."
        ) from error


def table(outcomes: Sequence[Outcome]) -> str:
    """The session as text, one line per request."""
    rows = [HEADER]
    for o in outcomes:
        report = o.report
        reused = report.evaluations < report.dense_evaluations
        rows.append(
            (
                o.wish.name,
                o.decision,
                f"{report.evaluations} of {report.dense_evaluations}",
                f"{o.seconds:.3f} (dense {o.dense_seconds:.3f})",
                f"{o.dense_seconds / o.seconds:.2f}x",
                f"{o.psnr_db:.1f} dB" if reused else "same",
                f"{o.attributes_right:.0%} (dense {o.dense_attributes_right:.0%})",
                report.reason,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def closing(summary: dict[str, Any], preset: str) -> str:
    if not summary["word_tweaks_accepted"]:
        return f"No word tweak was accepted under the preset {preset!r}."
    refused = "refused" if summary["unrelated_refused"] else "NOT refused"
    return (
        f"{summary['word_tweaks_accepted']} of {summary['word_tweaks']} word tweaks accepted: "
        f"{summary['evaluation_ratio']:.2f}x fewer evaluations, {summary['speed_up']:.2f}x less "
        f"time, {summary['psnr_db']:.1f} dB against their own dense runs; the unrelated prompt "
        f"was {refused}."
    )


def run_train(options: argparse.Namespace) -> None:
    from .demo.train import Recipe, train
    from .demo.wan import WanConfig

    recipe = (
        Recipe() if options.train_steps is None else Recipe(steps=options.train_steps, restarts=())
    )
    out = options.train_out or options.folder / "wan_tiny.safetensors"
    make_folder(out.parent, "--out")
    train(recipe, WanConfig(), options.folder, out)
    print(f"Weights: {out} (use them with 'python -m carnator demo --model {out}')")


def run_store(options: argparse.Namespace) -> None:
    from .store import Store

    if not options.store.is_dir():
        raise ValueError(f"There is no store at {options.store}: give the folder of a store.")
    with Store(options.store) as store:
        if options.action == "clear":
            store.clear()
        if options.action == "list":
            for entry in store.entries():
                label = entry.meta.get("labels", {}).get("prompt", "")
                print(f"{entry.id}  {entry.nbytes / 2**20:8.2f} MiB  {label}")
            return
        stats = store.stats()
        print(
            f"{stats.folder}: {stats.records} records, {stats.bytes / 2**20:.1f} of "
            f"{stats.size_limit / 2**20:.0f} MiB, {stats.hits} hits, "
            f"{stats.seconds_saved:.1f} seconds saved"
        )
