"""Measures what a donor at a given distance is worth: the ground of a backbone's risk table.

``python -m benchmarks.calibrate --json PATH [--sampler euler dpmpp_2m heun] [--groups N]``

A group is one pair, donor and target with the same noise, of every kind of change: words,
everything, CFG, schedule (steps or shift), LoRA. For each pair and each plan one row: log10 of D1
(second evaluation), evaluations and how late they are, PSNR of the latent against the target's own
dense run, and ``spent``, what the guard would have added up (factor 1). Captions are drawn by
another seed than those of ``benchmarks.fidelity``, and a target that occurs there is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from carnator.demo import captions, host
from carnator.demo.captions import Caption
from carnator.demo.model import BUNDLED, EmbeddedModel, with_lora
from carnator.plan import LATE
from carnator.samplers import contract

from .batch import WORD_KINDS, Batch, held_out_pairs, latent_peak, psnr_each
from .fidelity import PAIR_SEED

CALIBRATION_SEED = 2
PLANS = (7, 8, 9, 10, 12, 15)
LATES = (LATE,)
CFGS = (3.0, 3.5, 5.0, 6.0)
SCHEDULES = ((20, 5.0), (24, 5.0), (40, 5.0), (30, 3.0), (30, 4.0), (30, 8.0))  # steps, shift
LORAS = (0.03, 0.05, 0.1)
# CFG and schedule twice: they have rows of their own.
CHANGES = (*WORD_KINDS, "unrelated", "cfg", "schedule", "lora", "cfg", "schedule")
CHUNK = 8


def draw(rng: random.Random, kind: str, excluded: frozenset[str]) -> tuple[Caption, Caption]:
    """A donor's and a target's caption; every other target is one that training never saw."""
    word = kind in captions.TWEAKS
    unseen = rng.random() < 0.5
    while True:
        donor = captions.random_caption(rng)
        target = captions.tweak(donor, kind, rng) if word else donor
        if target.held_out == unseen and str(target) not in excluded:
            return donor, target


def chunks(
    groups: int, seed: int
) -> Iterator[tuple[str, list[tuple[Caption, Caption]], list[int]]]:
    """For every kind of change: captions and noise seeds of up to CHUNK pairs at a time."""
    rng = random.Random(f"carnator calibration {seed}")
    excluded = frozenset(
        str(p.target) for p in held_out_pairs(PAIR_SEED, (*WORD_KINDS, "unrelated"), 24)
    )
    for start in range(0, groups, CHUNK):
        size = min(CHUNK, groups - start)
        for kind in CHANGES:
            pairs = [draw(rng, kind, excluded) for _ in range(size)]
            yield kind, pairs, [rng.randrange(2**32) for _ in range(size)]


def measure(
    model: EmbeddedModel,
    kind: str,
    pairs: Sequence[tuple[Caption, Caption]],
    seeds: Sequence[int],
    sampler: str,
    plans: Sequence[int],
    lates: Sequence[float],
    rng: random.Random,
) -> list[dict[str, float | int | str]]:
    """Rows of one chunk: donors dense, targets dense, then targets under every plan."""
    cfgs, shift = [host.CFG] * len(pairs), host.SHIFT
    steps, current, peak = host.STEPS, model, latent_peak(model)
    donors_batch = Batch.of(model, [p[0] for p in pairs], seeds, cfgs, host.STEPS, sampler)
    if kind == "cfg":
        cfgs = [rng.choice(CFGS) for _ in pairs]
    elif kind == "schedule":
        steps, shift = rng.choice(SCHEDULES)
    elif kind == "lora":
        current = with_lora(model, rng.choice(LORAS), rng.randrange(2**31))
    targets = Batch.of(current, [p[1] for p in pairs], seeds, cfgs, steps, sampler, shift)
    shown, donors = donors_batch.dense(record=True)
    reference, _ = targets.dense()
    second = targets.d1(donors)
    donor_db = psnr_each(shown, reference, peak)
    variant = {"cfg": "+cfg", "schedule": "+schedule"}.get(kind, "")
    rows: list[dict[str, float | int | str]] = []
    scale = (targets.total + 1) / (
        host.STEPS + 1
    )  # as many evaluations per step where two are made
    for n, late in itertools.product(plans, lates):
        evaluations = max(3, round(n * scale)) if sampler == "heun" else n
        if evaluations >= targets.total:
            continue
        latents, spent = targets.planned(targets.probed_plan(evaluations, late), donors)
        for i, (db, sum_) in enumerate(zip(psnr_each(latents, reference, peak), spent.tolist())):
            rows.append(
                {
                    "change": kind,
                    "sampler": sampler,
                    "class": contract(sampler).kind + variant,
                    "total": targets.total,
                    "evaluations": evaluations,
                    "late": late,
                    "cfg": cfgs[i],
                    "steps": steps,
                    "shift": shift,
                    "log10_d1": round(math.log10(max(second[i], 1e-12)), 4),
                    "psnr_db": round(db, 3),
                    "donor_clip_db": round(donor_db[i], 3),
                    "spent": sum_,
                    "held_out": int(pairs[i][1].held_out),
                    "donor": str(pairs[i][0]),
                    "target": str(pairs[i][1]),
                    "seed": seeds[i],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=16, help="pairs of every kind of change")
    parser.add_argument("--sampler", nargs="+", choices=sorted(host.SAMPLERS), default=["euler"])
    parser.add_argument("--plans", nargs="+", type=int, default=list(PLANS))
    parser.add_argument("--lates", nargs="+", type=float, default=list(LATES))
    parser.add_argument("--seed", type=int, default=CALIBRATION_SEED)
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    model = EmbeddedModel.load(options.model)
    rows: list[dict[str, float | int | str]] = []
    head = {"model": model.name, "fingerprint": model.fingerprint, "peak": latent_peak(model)}
    head["architecture"] = model.architecture
    for sampler in options.sampler:
        rng = random.Random(f"carnator settings {options.seed} {sampler}")
        total = math.ceil(options.groups / CHUNK) * len(CHANGES)
        work = tqdm(chunks(options.groups, options.seed), sampler, total, unit="chunk")
        for kind, pairs, seeds in work:
            rows += measure(model, kind, pairs, seeds, sampler, options.plans, options.lates, rng)
            text = json.dumps({**head, "rows": rows}, indent=0)
            options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
