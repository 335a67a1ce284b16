"""What does Carnator cost where it cannot help? ``python -m benchmarks.overhead [--json PATH]``

The embedded host runs the same request plainly and with Carnator, in turns, where no donor can be
used: with an empty store, and with a store full of earlier generations that must be refused. Both
record the run, as a user's would. The latents must be equal to the last bit. The background
writing is waited for between runs and not part of the time; how long it takes is told apart.

Two figures of one cost. ``overhead_ms`` is the median difference of the sampler's wall time, with
its standard error: all there is, but under the noise of the model's own time. ``outside_ms`` is
the same for the wall time spent outside the model's forward passes, where nearly all of
Carnator's work lies; it is far less noisy.
``--comfy`` measures the same inside ComfyUI (found at $COMFYUI_PATH or ~/comfy/ComfyUI, and
started with its requirements installed).
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from carnator.demo import captions, host
from carnator.demo.model import BUNDLED, EmbeddedModel
from carnator.request import Settings
from carnator.store import Store

PROMPT = "red circle left and blue square still on gray"
# As many donors as the shortlist takes, so that all of them are looked at and refused.
OTHERS = (
    "yellow triangle up on white",
    "cyan square still and magenta triangle right on black",
    "green circle down on white",
    "magenta square left on black",
    "blue circle right and red triangle up on black",
    "cyan triangle down on gray",
    "yellow square still on black",
    "green triangle left and cyan circle up on white",
)
STRICTEST_DB = 80.0  # no plan is trusted to keep that, so that every donor is refused


class Timed(Protocol):
    """A finished run: its latent, the seconds of the sampler and of the model's forward passes
    in it, the report if there was one."""

    latent: Tensor
    seconds: float
    model_seconds: float
    report: Any


class Host(Protocol):
    """One of the two hosts. Without ``settings`` a run is plain."""

    name: str
    store: Any

    def run(self, prompt: str, settings: dict[str, Any] | None = None) -> Timed: ...


class Mismatch(AssertionError):
    """A run that should have been untouched differed from the plain one."""


def compare(
    name: str,
    plain: Callable[[], Timed],
    watched: Callable[[], Timed],
    settle: Callable[[], None],
    turns: int,
) -> dict[str, float | str | int]:
    """Medians over ``turns`` pairs of runs, in random order within a pair. ``settle`` comes before
    every run: a machine that has just waited for a disk runs faster for a while.
    """
    rng = random.Random(name)
    runs: dict[str, list[tuple[float, float]]] = {"plain": [], "watched": []}
    results: dict[str, Timed] = {}
    for _ in tqdm(range(turns), desc=name, unit="pair"):
        for which in rng.sample(("plain", "watched"), 2):
            settle()
            result = results[which] = (plain if which == "plain" else watched)()
            runs[which].append((result.seconds, result.seconds - result.model_seconds))
        report = results["watched"].report
        if report is not None and report.decision != "miss":
            raise Mismatch(f"The run was to be a miss and was {report.decision}: {report.reason}.")
        if not torch.equal(results["plain"].latent, results["watched"].latent):
            raise Mismatch("A run that found no donor gave another latent than the plain run.")
    return figures(name, runs["plain"], runs["watched"])


def figures(
    name: str, plain: list[tuple[float, float]], watched: list[tuple[float, float]]
) -> dict[str, float | str | int]:
    """Overhead from (all, outside the model) seconds of paired runs, in ms and in percent of a
    plain run: medians of the paired differences, and their standard errors (1.2533 standard
    deviations over sqrt(n) for a median, the deviation as 1.4826 median absolute ones)."""
    typical = statistics.median(all_ for all_, _ in plain)
    out: dict[str, float | str | int] = {
        "case": name,
        "pairs": len(plain),
        "plain_ms": round(1000 * typical, 2),
        "allowed_ms": round(1000 * (0.02 * typical + 0.002), 2),
    }
    for i, what in enumerate(("overhead", "outside")):
        extra = [w[i] - p[i] for p, w in zip(plain, watched, strict=True)]
        middle = statistics.median(extra)
        scatter = 1.4826 * statistics.median(abs(e - middle) for e in extra)
        out[f"{what}_ms"] = round(1000 * middle, 2)
        out[f"{what}_error_ms"] = round(1000 * 1.2533 * scatter / len(extra) ** 0.5, 2)
        out[f"{what}_percent"] = round(100 * middle / typical, 2)
    return out


@dataclass
class Run:
    """What a run gave."""

    latent: Tensor
    seconds: float
    model_seconds: float
    report: Any = None


class Embedded:
    """The embedded host."""

    name = "embedded host"

    def __init__(self, model: EmbeddedModel, steps: int, store: Store):
        self.model, self.steps, self.store = model, steps, store
        self.clock = Clock(model.network)

    def run(self, prompt: str, settings: dict[str, Any] | None = None) -> Run:
        self.clock.seconds = 0.0
        result = host.generate(
            self.model,
            captions.parse(prompt),
            steps=self.steps,
            settings=None if settings is None else Settings(**settings),
            store=self.store,
        )
        return Run(result.latent, result.seconds, self.clock.seconds, result.report)


class Clock:
    """Adds up the wall time of a module's forward passes."""

    def __init__(self, module: torch.nn.Module):
        self.seconds, self._began = 0.0, 0.0
        module.register_forward_pre_hook(self._start)
        module.register_forward_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began


def misses(where: Host, turns: int) -> list[dict[str, float | str | int]]:
    """Both kinds of miss in one host, whose store is empty."""
    strict = {"preset": "custom", "budget_db": STRICTEST_DB}
    where.run(PROMPT)

    def plain() -> Timed:
        return where.run(PROMPT)

    def watched() -> Timed:
        return where.run(PROMPT, strict)

    def settle() -> None:
        where.store.flush()
        for entry in where.store.entries():
            if entry.id not in donors:
                where.store.delete(entry.id)

    donors: set[str] = set()
    cases = [compare(f"{where.name}, empty store", plain, watched, settle, turns)]
    settle()
    for other in OTHERS:
        where.run(other, strict)
    where.store.flush()
    donors = {entry.id for entry in where.store.entries()}
    name = f"{where.name}, {len(donors)} donors refused"
    cases.append(compare(name, plain, watched, settle, turns))
    return cases


def writing(where: Host) -> float:
    """Milliseconds that the background takes to write one record, after the run."""
    where.store.clear()
    where.run(PROMPT, {})
    began = time.perf_counter()
    where.store.flush()
    return round(1000 * (time.perf_counter() - began), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="pairs of runs per case")
    parser.add_argument("--steps", type=int, default=host.STEPS)
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--comfy", action="store_true", help="also inside ComfyUI")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_flush_denormal(True)
    model = EmbeddedModel.load(options.model)
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        embedded = Embedded(model, options.steps, store)
        cases = misses(embedded, options.pairs)
        written = writing(embedded)
    if options.comfy:
        from .comfy import opened

        with opened(options.model, options.steps) as comfy:
            cases += misses(comfy, options.pairs)
    for case in cases:
        print(
            f"{case['case']}: plain {case['plain_ms']} ms, allowed {case['allowed_ms']} ms; "
            f"Carnator {case['overhead_ms']:+} +- {case['overhead_error_ms']} ms "
            f"({case['overhead_percent']:+} %), outside the model {case['outside_ms']:+} +- "
            f"{case['outside_error_ms']} ms ({case['outside_percent']:+} %)"
        )
    print(f"Writing the record in the background took {written} ms")
    if options.json:
        data = {"summary": {"cases": cases, "writing_ms": written}}
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
