"""Is a creator's session faster with Carnator, all requests counted?

``python -m benchmarks.session [--quick] [--backbone all] [--json PATH] [--plot PATH]``

Sessions of twelve requests (``benchmarks.creators``) under ``fast``, the preset for trying things
out, each with a store of its own that is empty at first. Every request is made twice, without
Carnator and with it, in random order; everything that Carnator does counts (``benchmarks.studio``).
A request that it refused must give the dense run's latent to the last bit, or the benchmark stops.

The summary, per backbone:

- ``fixed_seed_speedup``: dense time over Carnator's, all fixed-seed sessions together.
- ``mixed_slowdown``: Carnator's time over the dense time, less 1, all mixed sessions together
  (below 0: faster); ``mixed_slowdown_worst``: of the worst session.
- ``fixed_seed_cpu_speedup``, ``mixed_cpu_slowdown``: the same of processor seconds, which other
  work on the machine changes less; where they differ much, the machine was not idle.
- ``hit_rate``: share of the fixed-seed sessions' requests after the first that reused something,
  repeats among them; ``tweak_hit_rate``: the same of changed requests alone.
- ``worst_hit_db``: the lowest latent PSNR of a hit against its own dense run, over all sessions.
- ``kinds``: all of it for each kind of session, and what became of each kind of change.
- ``growth``: times with more and more records in the store (``benchmarks.growth``).
"""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from carnator.demo.model import EmbeddedModel
from carnator.risk import PRESETS

from .command import command, options, save
from .creators import KINDS, LENGTH, SESSION_SEED, drawn
from .fidelity import models
from .growth import grow
from .growth import text as growth_text
from .studio import Answer, Played, Studio
from .summary import low, mean, show

SESSIONS, QUICK_SESSIONS = 10, 2
APART = 0.1  # of wall and processor time's ratios: beyond it the machine was not idle
SIZES, QUICK_SIZES = (10, 100, 1000, 10_000), (10, 100, 1000)


def of_sessions(sessions: Sequence[Played], floor: float) -> dict[str, Any]:
    """The figures of sessions of one kind."""
    answers = [a for s in sessions for a in s.answers]
    later = [a for s in sessions for a in s.answers[1:]]
    dbs = [a.psnr_db for a in answers if a.psnr_db is not None]
    own, dense = sum(s.seconds for s in sessions), sum(s.dense_seconds for s in sessions)
    ratios = [s.dense_seconds / s.seconds for s in sessions]
    dense_evaluations = sum(a.dense_evaluations for a in answers)
    cpu, dense_cpu = sum(a.cpu_seconds for a in answers), sum(a.dense_cpu_seconds for a in answers)
    return {
        "sessions": len(sessions),
        "requests": len(answers),
        "dense_seconds": round(dense, 3),
        "seconds": round(own, 3),
        "writing_seconds": round(sum(a.writing_seconds for a in answers), 3),
        "opening_seconds": round(sum(s.opening_seconds for s in sessions), 3),
        "speedup": round(dense / own, 4),
        "lowest_speedup": round(min(ratios), 4),
        "median_speedup": round(statistics.median(ratios), 4),
        "cpu_speedup": round(dense_cpu / cpu, 4),
        "evaluation_speedup": round(dense_evaluations / sum(a.evaluations for a in answers), 4),
        "hit_rate": mean(float(a.hit) for a in later),
        "tweak_hit_rate": mean(float(a.hit) for a in later if a.change != "repeat"),
        "hit_psnr_db": mean(dbs),
        "hit_p10_db": low(dbs),
        "worst_hit_db": min(dbs, default=None),
        "hits_below_floor": mean(float(db < floor) for db in dbs),
        "attributes_right": mean(a.attributes for a in answers),
        "dense_attributes_right": mean(a.dense_attributes for a in answers),
        "changes": {
            change: of_change([a for a in answers if a.change == change])
            for change in dict.fromkeys(a.change for a in answers)
        },
    }


def of_change(answers: Sequence[Answer]) -> dict[str, Any]:
    dbs = [a.psnr_db for a in answers if a.psnr_db is not None]
    return {
        "requests": len(answers),
        "hits": len(dbs),
        "evaluations": mean(a.evaluations for a in answers if a.hit),
        "psnr_db": mean(dbs),
        "worst_db": min(dbs, default=None),
        "speedup": mean([sum(a.dense_seconds for a in answers) / sum(a.seconds for a in answers)]),
    }


def summarise(sessions: Sequence[Played], preset: str) -> dict[str, Any]:
    """The figures of one backbone without its growth; all kinds of sessions must be there."""
    floor = PRESETS[preset]
    kinds = {k: of_sessions([s for s in sessions if s.kind == k], floor) for k in KINDS}
    fixed, mixed = kinds["fixed"], kinds["mixed"]
    dbs = [a.psnr_db for s in sessions for a in s.answers if a.psnr_db is not None]
    return {
        "preset": preset,
        "floor_db": floor,
        "threads": torch.get_num_threads(),
        "fixed_seed_speedup": fixed["speedup"],
        "mixed_slowdown": round(1 / mixed["speedup"] - 1, 4),
        "mixed_slowdown_worst": round(1 / mixed["lowest_speedup"] - 1, 4),
        "fixed_seed_cpu_speedup": fixed["cpu_speedup"],
        "mixed_cpu_slowdown": round(1 / mixed["cpu_speedup"] - 1, 4),
        "hit_rate": fixed["hit_rate"],
        "tweak_hit_rate": fixed["tweak_hit_rate"],
        "worst_hit_db": min(dbs, default=None),
        "hits_below_floor": mean(float(db < floor) for db in dbs),
        "attributes_right": mean(a.attributes for s in sessions for a in s.answers),
        "dense_attributes_right": mean(a.dense_attributes for s in sessions for a in s.answers),
        "kinds": kinds,
    }


def text(name: str, summary: dict[str, Any]) -> str:
    """A backbone's summary for a terminal."""
    lines = [
        f"== {name}: sessions of {LENGTH} requests under {summary['preset']} "
        f"({summary['floor_db']:g} dB)",
        f"{'sessions':<10}{'dense s':>9}{'Carnator':>10}{'faster':>8}{'lowest':>8}{'by CPU':>8}"
        f"{'by evals':>9}"
        f"{'hit rate':>9}{'tweaks':>8}{'dB':>7}{'worst':>7}{'right':>8}{'dense':>7}",
    ]
    for kind, k in summary["kinds"].items():
        lines.append(
            f"{kind:<10}{k['dense_seconds']:>9.1f}{k['seconds']:>10.1f}{k['speedup']:>8.2f}"
            f"{k['lowest_speedup']:>8.2f}{k['cpu_speedup']:>8.2f}{k['evaluation_speedup']:>9.2f}"
            f"{show(k['hit_rate'], '.2f'):>9}{show(k['tweak_hit_rate'], '.2f'):>8}"
            f"{show(k['hit_psnr_db']):>7}{show(k['worst_hit_db']):>7}"
            f"{show(k['attributes_right'], '.3f'):>8}{show(k['dense_attributes_right'], '.3f'):>7}"
        )
    lines.append("fixed seed: " + ", ".join(
        f"{change} {c['hits']} of {c['requests']}"
        for change, c in summary["kinds"]["fixed"]["changes"].items()
    ))  # fmt: skip
    lines.append(
        f"Fixed-seed sessions {summary['fixed_seed_speedup']:.2f}x faster than dense; mixed ones "
        f"take {summary['mixed_slowdown']:+.1%} (worst session "
        f"{summary['mixed_slowdown_worst']:+.1%}); worst hit {show(summary['worst_hit_db'])} dB"
    )
    busy = [
        kind
        for kind, k in summary["kinds"].items()
        if abs(k["speedup"] / k["cpu_speedup"] - 1) > APART
    ]
    if busy:
        lines.append(
            f"Wall and processor time disagree ({', '.join(busy)}): the machine was not idle; "
            "measure again"
        )
    return "\n".join(lines)


def run(model: EmbeddedModel, preset: str, count: int, seed: int) -> list[Played]:
    """``count`` sessions of every kind, the kinds in turns."""
    rng = random.Random(f"carnator turns {seed}")
    total = count * len(KINDS) * LENGTH
    with tqdm(total=total, desc=model.family.title, unit="request") as bar:
        studio, played = Studio(model, preset, bar), []
        studio.generate(drawn("fixed", 0, seed)[0], steps=2)  # first-call costs
        for index in range(count):
            for kind in KINDS:
                bar.set_postfix_str(f"{kind} {index + 1} of {count}")
                played.append(studio.play(kind, index, drawn(kind, index, seed), rng))
    return played


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, help="sessions of each kind")
    parser.add_argument("--sizes", type=int, nargs="*", help="records in the growing store")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="fast")
    parser.add_argument("--seed", type=int, default=SESSION_SEED)
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_flush_denormal(True)
    count = chosen.sessions or (QUICK_SESSIONS if chosen.quick else SESSIONS)
    sizes = (QUICK_SIZES if chosen.quick else SIZES) if chosen.sizes is None else chosen.sizes
    try:
        found = models(chosen.backbone, chosen.model)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    data: dict[str, Any] = {"command": command("session"), "summary": {}, "sessions": {}}
    for model in found:
        name = model.family.name
        played = run(model, chosen.preset, count, chosen.seed)
        summary = {"fingerprint": model.fingerprint, **summarise(played, chosen.preset)}
        print(text(name, summary))
        summary["growth"] = grow(model, chosen.preset, sizes, chosen.quick)
        print(growth_text(summary["growth"]))
        data["summary"][name] = summary
        data["sessions"][name] = [asdict(p) for p in played]
        if chosen.json:
            save(chosen.json, data)
    if chosen.plot:
        from .bars import session_plot

        session_plot(data["summary"], chosen.plot)


if __name__ == "__main__":
    main()
