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

from .store_cli import add_store_command

if TYPE_CHECKING:
    from .demo.session import Outcome

BACKBONES = ("wan", "hunyuan", "ltx")
PRESETS = ("faithful", "balanced", "fast")
MIN_STEPS, MAX_STEPS = 6, 1000
HEADER = ("request", "decision", "evaluations", "seconds", "speed-up", "PSNR", "right", "why")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (0 done, 1 damage found, 2 asked wrongly, 130
    interrupted)."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        status: int | None = options.command(options)
    except (ValueError, OSError) as error:
        print(f"carnator: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("carnator: interrupted", file=sys.stderr)
        return 130
    return status or 0


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
    demo.add_argument("--preset", choices=PRESETS, default="fast")
    demo.add_argument("--seed", type=_whole(0, 2**63), default=30)
    demo.add_argument("--steps", type=_whole(MIN_STEPS, MAX_STEPS), default=30)
    demo.add_argument("--cfg", type=_guidance, help="guidance scale")
    demo.add_argument("--quick", action="store_true", help="one word tweak, every run timed once")
    demo.add_argument("--store", type=Path, help="folder of the store (default: a temporary one)")
    demo.add_argument("--backbone", choices=BACKBONES, default="wan", help="bundled model to use")
    demo.add_argument("--model", type=Path, help="checkpoint to use instead of the bundled one")
    parts = demo.add_subparsers(metavar="{train,check}")
    add_train(parts)
    add_check(parts)
    add_store_command(commands)
    return top


# Options that ``demo`` has as well are suppressed where they are not given, so that its own
# values, given before the command, hold.


def add_train(commands: Any) -> None:
    training = commands.add_parser("train", help="train a backbone of the demo")
    training.set_defaults(command=run_train)
    training.add_argument("--backbone", choices=BACKBONES, default=argparse.SUPPRESS)
    training.add_argument(
        "--steps",
        type=_whole(1, 10**7),
        dest="train_steps",
        help="length; a run may be resumed with another one before its rate decays",
    )
    training.add_argument(
        "--decay",
        type=_share,
        metavar="SHARE",
        help="last part of the steps in which the rate falls",
    )
    training.add_argument(
        "--folder", type=Path, help="for checkpoints (default: training/BACKBONE)"
    )
    training.add_argument("--out", type=Path, dest="train_out", help="file for the weights")


def add_check(commands: Any) -> None:
    checking = commands.add_parser(
        "check", help="does a backbone draw what captions ask that training never saw?"
    )
    checking.set_defaults(command=run_check)
    checking.add_argument("--backbone", choices=BACKBONES, default=argparse.SUPPRESS)
    checking.add_argument("--model", type=Path, default=argparse.SUPPRESS)
    checking.add_argument("--json", type=Path, default=argparse.SUPPRESS, help="also write JSON")
    checking.add_argument("--captions", type=_whole(1, 2000), default=200)
    checking.add_argument(
        "--seed", type=_whole(0, 2**63), dest="check_seed", default=0, help="of captions and noise"
    )


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return read


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


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

    from .demo import families, host, session, sheet
    from .demo.model import EmbeddedModel
    from .store import Store

    torch.set_flush_denormal(True)
    model = EmbeddedModel.load(options.model or families.named(options.backbone).path)
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
    from dataclasses import replace

    from .demo import families
    from .demo.train import train

    family = families.named(options.backbone)
    recipe = family.recipe
    if options.train_steps is not None:
        recipe = replace(recipe, steps=options.train_steps, restarts=())
    if options.decay is not None:
        recipe = replace(recipe, decay_share=options.decay)
    folder = options.folder or Path("training") / family.name
    out = options.train_out or folder / family.path.name
    make_folder(out.parent, "--out")
    train(recipe, family.config(), folder, out)
    print(f"Weights: {out} (use them with 'python -m carnator demo --model {out}')")


def run_check(options: argparse.Namespace) -> None:
    import torch
    from tqdm import tqdm

    from .demo import accuracy, families, host
    from .demo.model import EmbeddedModel

    torch.set_flush_denormal(True)
    model = EmbeddedModel.load(options.model or families.named(options.backbone).path)
    if options.json:
        make_folder(options.json.parent, "--json")
    with tqdm(total=options.captions * host.STEPS, unit="step", dynamic_ncols=True) as bar:
        result = accuracy.measure(
            model,
            options.captions,
            cfg=options.cfg or host.CFG,
            seed=options.check_seed,
            progress=bar.update,
        )
    parts = ", ".join(f"{name} {share:.1%}" for name, share in result["by_attribute"].items())
    print(
        f"{model.name}: {result['attributes_right']:.1%} of the attributes of "
        f"{result['captions']} held-out captions are right ({parts}); "
        f"{result['all_right']:.1%} of the clips in all of them."
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
