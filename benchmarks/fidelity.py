"""How near to its own dense run does a tweak come, for a given number of model evaluations?

``python -m benchmarks.fidelity [--quick] [--backbone all] [--json PATH] [--plot PATH]``

Held-out tweaks (``benchmarks.pairs``), donor and target with the same noise, 30 Euler steps, CFG 4,
shift 5 unless the tweak changes them. Every published rule in ``benchmarks.competitors`` is swept
over its knob in the same harness; Carnator is run as a user runs it (``host.generate`` with the
donor's record in the store), swept over its own knob, the budget; ``donor`` is its predictor under
the shipped plan of a fixed length, whatever the acceptance says. All are compared with the
target's own dense run: PSNR, SSIM, attributes, leakage (``benchmarks.metrics``).

The summary, per backbone, over the pairs that Carnator accepts under the preset:

- ``evaluation_ratio_at_31db``: the evaluations of the best competitor for a mean of 31 dB, over
  Carnator's for the same. A method's evaluations for 31 dB are read off its curve of mean PSNR over
  mean evaluations, both over all accepted pairs, one point for each setting of its knob, linearly
  between points and never above a point with fewer evaluations and more dB. Where even its
  cheapest point lies above 31 dB that point counts. A pair's PSNR counts up to 59 dB.
- ``evaluation_ratio_at_31db_p10``: the same with the tenth percentile of PSNR in place of the mean,
  which a method cannot reach by being perfect on some pairs and useless on others. Where only CFG,
  schedule or weights change a little, the donor's own clip is near the target's, and landing on it
  costs nothing: ``words`` and ``settings`` have both ratios apart.
- ``p10_db``: the tenth percentile of PSNR of Carnator as it ran under the preset, and of that best
  competitor at its own operating point: its cheapest setting whose mean reaches 31 dB.
- ``leakage_over_dense``: Carnator's mean leakage less the dense runs', 0.01 being one point.
- ``accepted_below_floor``: share of the accepted pairs below the preset's PSNR.
- ``refused_but_fine``: share of the refused pairs whose plan of the accepted pairs' median length
  would have kept the floor.
- ``plain_ratio``, ``own_ratio``: evaluations each of the two needs to match each hit's own PSNR,
  over the hit's. ``evaluation_ratio``: those of a dense run over the hit's.

``--quick`` draws fewer pairs, sets every second knob, and measures competitors on accepted pairs
alone: fewer steps and own extrapolation, or those that ``--rivals`` names. The best competitor is
the best of those measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from carnator.demo.families import FAMILIES
from carnator.demo.model import EmbeddedModel, with_lora
from carnator.plan import LATE
from carnator.risk import PRESETS

from .batch import Batch, Pair
from .competitors import COMPETITORS, Case, Pool, fit
from .competitors.plain import COUNTS, steps_for
from .measured import CARNATOR, Measured, Point, Session, play
from .metrics import judge
from .pairs import PAIR_SEED, chunks, stratified
from .summary import needed, summarise
from .table import text

__all__ = ["PAIR_SEED", "needed"]

PAIRS, QUICK_PAIRS = 80, 48
QUICK_RIVALS = ("plain", "own")
POOL, QUICK_POOL = 64, 16
FIT_RUNS, QUICK_FIT_RUNS = 16, 8
JUDGED = (8.0, 12.0)  # plans that refused pairs are judged by in the short form
BUDGETS = (12.0, 16.0, 20.0, 24.0, 28.0, 31.0, 36.0)


def every_second(knobs: Sequence[float]) -> Sequence[float]:
    """Every second knob, the last one among them."""
    return knobs[::-1][::2][::-1]


@dataclass
class Bench:
    """One backbone under measurement."""

    model: EmbeddedModel
    pairs: list[Pair]
    preset: str
    quick: bool
    rivals: Sequence[str] = tuple(c.name for c in COMPETITORS)

    def __post_init__(self) -> None:
        self.patched: dict[float, EmbeddedModel] = {0.0: self.model}

    @cached_property
    def pool(self) -> Pool:
        return Pool(self.model, QUICK_POOL if self.quick else POOL, self.pairs)

    @cached_property
    def rescale(self) -> np.poly1d:
        return fit(self.model, QUICK_FIT_RUNS if self.quick else FIT_RUNS)

    def knobs(self, knobs: Sequence[float], published: float | None = None) -> Sequence[float]:
        if not self.quick:
            return knobs
        some = every_second(knobs)
        return some if published is None or published in some else sorted((*some, published))

    def current(self, pair: Pair) -> EmbeddedModel:
        """The weights of a pair's target."""
        if pair.lora not in self.patched:
            self.patched[pair.lora] = with_lora(self.model, pair.lora)
        return self.patched[pair.lora]

    def measure(self, pairs: Sequence[Pair], bar: tqdm) -> list[Measured]:
        """Measure pairs whose targets share weights and schedule."""
        first, current = pairs[0], self.current(pairs[0])
        budgets = self.knobs(BUDGETS, PRESETS[self.preset])
        bar.set_postfix_str("Carnator")
        sessions = []
        for pair in pairs:
            sessions.append(play(self.model, current, pair, self.preset, budgets))
            bar.update()
        targets = Batch.of(
            current,
            [p.target for p in pairs],
            [p.seed for p in pairs],
            [p.target_cfg for p in pairs],
            first.target_steps,
            shift=first.target_shift,
        )
        bar.set_postfix_str("dense runs")
        reference, _ = targets.dense()
        self.judge_sessions(current, sessions, pairs, reference)
        hits = [i for i, s in enumerate(sessions) if s.measured.accepted]
        misses = [i for i in range(len(pairs)) if i not in hits]
        wanted = [*hits, *misses] if not self.quick else hits
        self.follow(targets, sessions, pairs, reference, wanted, self.knobs(COUNTS))
        if self.quick:
            self.follow(targets, sessions, pairs, reference, misses, JUDGED)
        if wanted:
            donors = [s.donor for s in sessions]
            case = Case(targets, donors, self.pool, self.rescale).select(wanted)
            found = [sessions[i].measured for i in wanted]
            self.compete(case, reference[wanted], [pairs[i] for i in wanted], found, bar)
        return [s.measured for s in sessions]

    def judge_sessions(
        self,
        model: EmbeddedModel,
        sessions: Sequence[Session],
        pairs: Sequence[Pair],
        reference: Tensor,
    ) -> None:
        """What Carnator's runs, the dense runs and the donors' clips are worth."""
        steps = pairs[0].target_steps
        shown = torch.stack([s.donor.states[-1] for s in sessions])
        dense = judge(model, reference, reference, pairs)
        copied = judge(model, shown, reference, pairs)
        for i, session in enumerate(sessions):
            attempts = (session.own, *session.others)
            latents = torch.cat([a.latent for a in attempts])
            truth = reference[i].expand_as(latents)
            points = [
                Point.of(a.budget_db, a.evaluations, steps, q)
                for a, q in zip(
                    attempts, judge(model, latents, truth, [pairs[i]] * len(attempts)), strict=True
                )
            ]
            found = session.measured
            found.own, found.dense = points[0], Point.of(0, steps, steps, dense[i])
            found.shown = Point.of(0, 0, steps, copied[i])
            if session.others:
                found.curves[CARNATOR] = points[1:]

    def follow(
        self,
        targets: Batch,
        sessions: Sequence[Session],
        pairs: Sequence[Pair],
        reference: Tensor,
        rows: Sequence[int],
        counts: Sequence[float],
    ) -> None:
        """Add the curve of Carnator's predictor under plans of a fixed length, for some rows."""
        if not rows:
            return
        some, steps = targets.select(rows), targets.steps
        records, chosen = [sessions[i].record for i in rows], [pairs[i] for i in rows]
        for count in counts:
            evaluations = steps_for(count, steps)
            latents, _ = some.planned(some.probed_plan(evaluations, LATE), records)
            qualities = judge(targets.model, latents, reference[rows], chosen)
            for i, q in zip(rows, qualities, strict=True):
                points = sessions[i].measured.curves.setdefault("donor", [])
                points.append(Point.of(count, evaluations, steps, q))

    def compete(
        self,
        case: Case,
        reference: Tensor,
        pairs: Sequence[Pair],
        measured: Sequence[Measured],
        bar: tqdm,
    ) -> None:
        """Add the curves of every competitor."""
        model, steps = case.targets.model, case.targets.steps
        for competitor in (c for c in COMPETITORS if c.name in self.rivals):
            bar.set_postfix_str(competitor.name)
            for knob in self.knobs(competitor.knobs, competitor.published):
                got = competitor.run(case, knob)
                qualities = judge(model, got.latents, reference, pairs)
                for m, n, q in zip(measured, got.evaluations.tolist(), qualities, strict=True):
                    points = m.curves.setdefault(competitor.name, [])
                    points.append(Point.of(knob, n, steps, q))

    def run(self) -> list[Measured]:
        out = []
        with tqdm(total=len(self.pairs), desc=self.model.family.title, unit="pair") as bar:
            bar.set_postfix_str("pool and calibration")
            _ = self.pool, self.rescale
            for group in chunks(self.pairs):
                out += self.measure(group, bar)
        return out


def models(backbone: str, path: Path | None) -> list[EmbeddedModel]:
    """The models asked for. Raises FileNotFoundError or ValueError that says what to do."""
    if path is not None:
        return [EmbeddedModel.load(path)]
    names = (
        [n for n, f in FAMILIES.items() if f.path.is_file()] if backbone == "all" else [backbone]
    )
    return [EmbeddedModel.load(FAMILIES[name].path) for name in names]


def save(path: Path, data: dict) -> None:
    """Write the results as JSON with one line for each pair, measured or what JSON made of it."""
    lines = [
        f"  {json.dumps(name)}: [\n"
        + ",\n".join(
            f"   {json.dumps(m if isinstance(m, dict) else m.as_dict())}" for m in measured
        )
        + "\n  ]"
        for name, measured in data["pairs"].items()
    ]
    head = {k: v for k, v in data.items() if k != "pairs"}
    start = re.sub(  # one line for each setting of a curve
        r"\{[^{}\[\]]*\}",
        lambda m: " ".join(m.group().split()),
        json.dumps(head, indent=1).removesuffix("\n}"),
    )
    path.write_text(f'{start},\n "pairs": {{\n' + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer pairs, settings, competitors")
    parser.add_argument("--backbone", choices=(*FAMILIES, "all"), default="all")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of the bundled ones")
    parser.add_argument("--pairs", type=int, help="pairs in all")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="balanced")
    names = [c.name for c in COMPETITORS]
    parser.add_argument("--rivals", nargs="+", choices=names, help="competitors to measure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_flush_denormal(True)
    total = options.pairs or (QUICK_PAIRS if options.quick else PAIRS)
    data: dict[str, dict] = {"summary": {}, "pairs": {}}
    command = " ".join(["python -m benchmarks.fidelity", *sys.argv[1:]])
    try:
        found, pairs = models(options.backbone, options.model), stratified(total)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for model in found:
        name = model.family.name
        rivals = options.rivals or (QUICK_RIVALS if options.quick else names)
        bench = Bench(model, pairs, options.preset, options.quick, rivals)
        measured = data["pairs"][name] = bench.run()
        data["summary"][name] = {
            "fingerprint": model.fingerprint,
            "teacache_polynomial": [float(f"{c:.6g}") for c in bench.rescale.coeffs],
            **summarise(measured, options.preset),
        }
        print(text(name, data["summary"][name]))
        if options.json:
            save(options.json, {"command": command, **data})
    if options.plot:
        from .plot import fidelity_plot

        fidelity_plot(data["summary"], data["pairs"], options.plot)


if __name__ == "__main__":
    main()
