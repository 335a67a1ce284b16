"""How near to its own dense run does a tweak come, for a given number of model evaluations?

``python -m benchmarks.fidelity --quick --json PATH --plot PATH``

Held-out tweaks (captions training never saw), donor and target with the same noise. Three ways
to spend n evaluations: plain fewer steps, own linear extrapolation (evaluations spaced as suits
it best), and donor + difference. Then the runs Carnator makes of its own accord under a preset:
which pairs it accepts, what it reaches, and how many evaluations the other two ways need for
that. A baseline's curve is made monotone first (the best of all runs with at most n
evaluations), which can only help it.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from carnator.demo import host, quality
from carnator.demo.captions import Caption
from carnator.demo.model import BUNDLED, EmbeddedModel
from carnator.recording import load
from carnator.request import Settings
from carnator.risk import PRESETS
from carnator.store import Store
from carnator.trajectory import Trajectory

from .batch import WORD_KINDS, Batch, Pair, held_out_pairs, psnr_each

PAIR_SEED = 1
QUICK_COUNTS = (6, 8, 10, 13, 17, 22)
COUNTS = (5, 6, 7, 8, 10, 12, 15, 18, 20, 24, 27)
METHODS = ("plain", "own", "donor")
CHUNK = 8
OWN_LATE = 0.5  # the spacing at which own extrapolation does best; a donor allows a later one


@dataclass
class Measured:
    """One pair: PSNR (dB, of latents) per method and evaluation count, and what Carnator did."""

    kind: str
    donor: str
    target: str
    seed: int
    d0: float
    donor_clip_db: float
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    decision: str = ""
    reason: str = ""
    evaluations: int = 0
    psnr_db: float = 0.0
    clip_psnr_db: float = 0.0
    attributes_right: float = 0.0
    dense_attributes_right: float = 0.0

    @property
    def accepted(self) -> bool:
        return self.decision in ("hit", "exact")


def chunks(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    for i in range(0, len(pairs), CHUNK):
        yield pairs[i : i + CHUNK]


def measure(
    model: EmbeddedModel, pairs: Sequence[Pair], counts: Sequence[int], preset: str, bar: tqdm
) -> list[Measured]:
    """Run pairs that share their settings through Carnator one by one, as a user would; for the
    accepted ones measure the curves of all methods in one batch."""
    out, donors, references = [], [], []
    for pair in pairs:
        measured, reference, donor = accept(model, pair, preset)
        out.append(measured)
        bar.update()
        if donor is not None:
            donors.append(donor)
            references.append(reference)
    hits = [(p, m) for p, m in zip(pairs, out, strict=True) if m.accepted]
    if not hits:
        return out
    chosen = [p for p, _ in hits]
    targets = Batch.of(
        model,
        [p.target for p in chosen],
        [p.seed for p in chosen],
        [p.target_cfg for p in chosen],
        chosen[0].target_steps,
    )
    for n in counts:
        runs = {
            "plain": targets.with_steps(n).dense()[0],
            "own": targets.planned(targets.plan(n, OWN_LATE), None)[0],
            "donor": targets.planned(targets.plan(n, OWN_LATE), donors)[0],
        }
        for method, latents in runs.items():
            dbs = psnr_each(latents, torch.cat(references))
            for (_, m), db in zip(hits, dbs, strict=True):
                m.curves[method][n] = db
        bar.set_postfix(curves=n)
    return out


def accept(
    model: EmbeddedModel, pair: Pair, preset: str
) -> tuple[Measured, torch.Tensor, Trajectory | None]:
    """Run a pair through Carnator with the donor alone in the store: what happened, the target's
    own dense latent, and on a hit the donor's trajectory."""

    def run(caption: Caption, settings: Settings | None) -> host.Result:
        return host.generate(
            model,
            caption,
            seed=pair.seed,
            cfg=pair.target_cfg,
            steps=pair.target_steps,
            settings=settings,
            store=store,
        )

    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        shown = run(pair.donor, Settings(preset=preset))
        store.flush()
        result = run(pair.target, Settings(preset=preset, record=False))
        report = result.report
        assert report is not None
        hit = report.decision in ("hit", "exact")
        dense = run(pair.target, None) if hit else result
        levels = host.simple_sigmas(pair.target_steps).tolist()[:-1]
        donor = load(store, store.entries()[0], levels)[0] if hit else None
    names = (pair.kind, str(pair.donor), str(pair.target), pair.seed, report.d0 or 0.0)
    measured = Measured(
        *names,
        donor_clip_db=psnr_each(shown.latent, dense.latent)[0],
        curves={m: {} for m in METHODS},
        decision=report.decision,
        reason=report.reason,
        evaluations=report.evaluations,
        psnr_db=psnr_each(result.latent, dense.latent)[0],
        clip_psnr_db=quality.psnr(result.clip, dense.clip),
        attributes_right=quality.attributes_right(result.clip, pair.target),
        dense_attributes_right=quality.attributes_right(dense.clip, pair.target),
    )
    return measured, dense.latent, donor


def needed(curve: dict[int, float], psnr_db: float, total: int) -> float:
    """Evaluations a curve needs for a PSNR, interpolated linearly; ``total`` where it falls short.

    The curve is taken as the best of all counts up to n.
    """
    best, before = -float("inf"), (0, 0.0)
    for n, db in sorted(curve.items()):
        best = max(best, db)
        if best >= psnr_db:
            if before[0] == 0 or best <= before[1]:
                return float(n)
            return before[0] + (n - before[0]) * (psnr_db - before[1]) / (best - before[1])
        before = (n, best)
    return float(total)


def summarise(
    measured: Sequence[Measured], counts: Sequence[int], preset: str
) -> dict[str, object]:
    """Means over the accepted pairs, and per kind and count over all of them."""
    floor, total = PRESETS[preset], host.STEPS
    hits = [m for m in measured if m.accepted]

    def ratio(method: str) -> list[float]:
        return [needed(m.curves[method], m.psnr_db, total) / m.evaluations for m in hits]

    def mean(values: Sequence[float]) -> float | None:
        return round(statistics.fmean(values), 3) if values else None

    def curve(group: Sequence[Measured]) -> dict[str, dict[int, float | None]]:
        return {k: {n: mean([m.curves[k][n] for m in group]) for n in counts} for k in METHODS}

    kinds = sorted({m.kind for m in measured})
    by_kind = {k: [m for m in measured if m.kind == k] for k in kinds}
    return {
        "preset": preset,
        "floor_db": floor,
        "pairs": len(measured),
        "accepted": len(hits),
        "plain_ratio": mean(ratio("plain")),
        "own_ratio": mean(ratio("own")),
        "evaluation_ratio": mean([total / m.evaluations for m in hits]),
        "accepted_psnr_db": mean([m.psnr_db for m in hits]),
        "accepted_lowest_db": round(min(m.psnr_db for m in hits), 3) if hits else None,
        "below_floor_share": mean([float(m.psnr_db < floor) for m in hits]),
        "attributes_right": mean([m.attributes_right for m in hits]),
        "dense_attributes_right": mean([m.dense_attributes_right for m in hits]),
        "all_dense_attributes_right": mean([m.dense_attributes_right for m in measured]),
        "accepted_curves": curve(hits),
        "kinds": {
            k: {
                "pairs": len(group),
                "accepted": sum(m.accepted for m in group),
                "mean_d0": mean([m.d0 for m in group]),
                "accepted_psnr_db": mean([m.psnr_db for m in group if m.accepted]),
            }
            for k, group in by_kind.items()
        },
    }


def text(summary: dict, counts: Sequence[int]) -> str:
    """The summary for a terminal."""
    lines = ["mean PSNR (dB) against the own dense run, accepted pairs"]
    lines.append("evaluations  " + "".join(f"{n:>7}" for n in counts))
    for method in METHODS:
        curve = summary["accepted_curves"][method]
        lines.append(f"{method:<13}" + "".join(f"{curve[n] or 0:7.1f}" for n in counts))
    for kind, group in summary["kinds"].items():
        reached = group["accepted_psnr_db"]
        psnr = "" if reached is None else f", {reached:.1f} dB"
        d0 = group["mean_d0"]
        lines.append(
            f"{kind}: {group['accepted']} of {group['pairs']} accepted (mean D0 {d0}){psnr}"
        )
    if summary["accepted"]:
        lines.append(
            f"{summary['accepted']} accepted under {summary['preset']} ({summary['floor_db']} dB): "
            f"{summary['evaluation_ratio']}x fewer evaluations, {summary['accepted_psnr_db']} dB, "
            f"{summary['below_floor_share']:.1%} below the floor; for the same PSNR plain fewer "
            f"steps needs {summary['plain_ratio']}x, own extrapolation {summary['own_ratio']}x "
            "the evaluations"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer pairs and counts")
    parser.add_argument("--pairs", type=int, help="pairs of every kind")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="balanced")
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_flush_denormal(True)
    model = EmbeddedModel.load(options.model)
    counts = QUICK_COUNTS if options.quick else COUNTS
    per_kind = options.pairs or (16 if options.quick else 24)
    pairs = held_out_pairs(PAIR_SEED, (*WORD_KINDS, "unrelated"), per_kind)
    measured = []
    with tqdm(total=len(pairs), unit="pair") as bar:
        for chunk in chunks(pairs):
            measured += measure(model, chunk, counts, options.preset, bar)
    summary = summarise(measured, counts, options.preset)
    print(text(summary, counts))
    if options.json:
        data = {"summary": summary, "pairs": [asdict(m) for m in measured]}
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        from .plot import fidelity_plot

        hits = [(m.evaluations, m.psnr_db) for m in measured if m.accepted]
        fidelity_plot(summary, counts, hits, options.plot)


if __name__ == "__main__":
    main()
