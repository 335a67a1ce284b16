"""Do trajectory and connectivity reuse add up? ``python -m benchmarks.joint [--whole]``

On a Wan of real width (``joint_model.py``: two layers, 8,192 tokens, attention that is local by
construction), four ways to make a changed request of STEPS steps: dense, with sparse attention
only, with trajectory reuse only, with both. ``joint_over_product`` is the speed-up of both over
the product of the speed-ups of each.

Such a run takes a quarter of an hour on two cores. So, unless ``--whole`` is given, times are
**composed**: a request of four steps is recorded, another reuses its connectivity, through the
engine and the store as always; each of its sparse evaluations is followed by a dense one of the
same latents. Of the medians, and of the time that a predicted step takes, the times of whole
runs are added up: EVALUATIONS are made under trajectory reuse, the cheapest plan there is a risk
table for; the first two are dense in every run. ``--whole`` makes all these runs from end to end,
whatever the engine decides, and compares the clips.

Of the two layers the first stays dense, as in every model; in one of thirty that would be a
thirtieth of the attention, not half.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from carnator.demo import captions, host, quality
from carnator.demo.model import EmbeddedModel
from carnator.predict import Predictor, schedule_position
from carnator.report import Report
from carnator.request import Settings
from carnator.risk import table_for
from carnator.sparse import FIRST
from carnator.store import Store

from .command import command, save
from .joint_model import GRID, LAYERS, built, latent_shape

STEPS = 30
EVALUATIONS = min(row.evaluations for row in table_for("").kinds["single"])
SHORT = 4  # steps of the runs that evaluations are timed in
SEED = 30
DONOR = "red circle left and blue square still on gray"
TARGET = "green circle left and blue square still on gray"
ANY = 10.0  # dB: what random weights make of a request is not to decide whether it is a hit
SMALL_GRID, SMALL = (2, 16, 32), {"dim": 384, "heads": 3, "ffn": 512}


class Pair(NamedTuple):
    """Wall and processor seconds of an evaluation with and without sparse attention, and the
    relative error of its denoised latents."""

    sparse: float
    dense: float
    sparse_cpu: float
    dense_cpu: float
    error: float


def clocked(work: Callable[..., Any], *args: Any) -> tuple[Any, float, float]:
    """What a call gives, and the wall and processor seconds it takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    made = work(*args)
    return made, time.perf_counter() - wall, time.process_time() - cpu


class Timed:
    """A model that keeps the seconds of its evaluations; those with sparse attention are followed
    by a dense one of the same latents, which the run takes no notice of."""

    def __init__(self, model: EmbeddedModel, bar: tqdm, compared: bool):
        self.model, self.bar, self.compared = model, bar, compared
        self.seconds: list[float] = []
        self.pairs: list[Pair] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def branches(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        made, own, own_cpu = clocked(self.model.branches, *args)
        self.seconds.append(own)
        override = args[5]
        if self.compared and override is not None and set(override.used) - {"host"}:
            dense, seconds, cpu = clocked(self.model.branches, *args[:4])
            error = float((made[0] - dense[0]).norm() / dense[0].norm())
            self.pairs.append(Pair(own, seconds, own_cpu, cpu, error))
        self.bar.update()
        return made


def generated(
    model: Any, caption: str, shape: tuple[int, ...], steps: int, store: Store | None, **fields: Any
) -> host.Result:
    """One request without guidance (one pass an evaluation); ``fields`` are of its settings."""
    seed = fields.pop("seed", SEED)
    settings = None if store is None else Settings("custom", ANY, exact_hits=False, **fields)
    noise = host.seed_noise(seed, shape)
    made = host.generate(
        model, captions.parse(caption), seed=seed, noise=noise, cfg=1.0, steps=steps,
        settings=settings, store=store,
    )  # fmt: skip
    if store is not None:
        store.flush()
    return made


def predicted_seconds(shape: tuple[int, ...]) -> float:
    """Seconds of one predicted step at latents of a shape."""
    sigmas = host.simple_sigmas(STEPS).tolist()
    donor = [torch.randn(shape) for _ in range(2)]
    predictor = Predictor(lambda s: torch.lerp(*donor, s), schedule_position(sigmas))
    for i in (1, 7):
        predictor.add(sigmas[i], torch.randn(shape))
    taken = []
    for i in range(8, 14):
        began = time.perf_counter()
        predictor.predict(sigmas[i])
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def used(report: Report) -> dict[str, Any]:
    """What a run's report says of its sparse attention."""
    said = report.sparse
    if said is None:
        return {}
    ran = [use for use in said.layers if use.least_recall is not None]
    recalls = [use.least_recall for use in ran if use.least_recall is not None]
    return {
        "layers_sparse": len(ran),
        "density": round(statistics.fmean(u.density for u in ran), 4) if ran else None,
        "least_recall": round(min(recalls), 4) if ran else None,
        "attention_calls": said.calls,
        "reason": said.reason,
    }


def composed(model: EmbeddedModel, shape: tuple[int, ...], backend: str) -> dict[str, Any]:
    """Times of whole runs, added up of those of their evaluations."""
    sparse = {"sparse": "auto", "attention": backend}
    bar = tqdm(total=2 * SHORT, unit="evaluation")
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store, bar:
        watched = Timed(model, bar, compared=False)
        generated(watched, DONOR, shape, SHORT, store, **sparse)
        target = Timed(model, bar, compared=True)
        done = generated(target, TARGET, shape, SHORT, store, seed=SEED + 1, record=False, **sparse)
    assert done.report is not None
    if not target.pairs:
        raise SystemExit(f"Sparse attention was not used: {done.report.text()}")
    pairs = target.pairs
    dense = statistics.median(p.dense for p in pairs)
    # Within a pair the load on the machine is about the same.
    own = dense * statistics.median(p.sparse / p.dense for p in pairs)
    cpu = statistics.median(p.dense_cpu / p.sparse_cpu for p in pairs)
    predicted = predicted_seconds(shape)
    skipped = (STEPS - EVALUATIONS) * predicted
    return {
        "composed": True,
        "evaluation_seconds": {
            "dense": round(dense, 4),
            "sparse": round(own, 4),
            "predicted": round(predicted, 5),
        },
        "evaluation_speedup": round(dense / own, 4),
        "evaluation_speedup_cpu": round(cpu, 4),
        "denoised_error": round(max(p.error for p in pairs), 6),
        "evaluations": {"dense": STEPS, "trajectory": EVALUATIONS},
        "seconds": {
            "dense": STEPS * dense,
            "sparse_only": FIRST * dense + (STEPS - FIRST) * own,
            "trajectory_only": EVALUATIONS * dense + skipped,
            "both": FIRST * dense + (EVALUATIONS - FIRST) * own + skipped,
        },
        **used(done.report),
    }


def whole(model: EmbeddedModel, shape: tuple[int, ...], backend: str) -> dict[str, Any]:
    """Runs from end to end."""
    sparse = {"sparse": "auto", "attention": backend}
    bar = tqdm(total=3 * STEPS + 2 * EVALUATIONS, unit="evaluation")
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store, bar:
        timed = Timed(model, bar, compared=False)
        generated(timed, DONOR, shape, STEPS, store, **sparse)
        runs: dict[str, host.Result] = {}
        cpu: dict[str, float] = {}
        runs["dense"], _, cpu["dense"] = clocked(generated, timed, TARGET, shape, STEPS, None)
        for name, fields in (
            ("trajectory_only", {}),
            ("both", sparse),
            # Another noise, for which there is no donor of a trajectory.
            ("sparse_only", {**sparse, "record": False, "seed": SEED + 1}),
        ):
            ask = partial(generated, timed, TARGET, shape, STEPS, store, **fields)
            runs[name], _, cpu[name] = clocked(ask)
    reports = {name: run.report for name, run in runs.items() if run.report is not None}
    if any(r.decision != "hit" for n, r in reports.items() if n != "sparse_only"):
        raise SystemExit(reports["both"].text())
    dense = runs["dense"]
    return {
        "composed": False,
        "evaluations": {name: run.calls for name, run in runs.items()},
        "seconds": {name: run.seconds for name, run in runs.items()},
        "cpu_seconds": cpu,
        "psnr_db": {
            name: round(quality.psnr(runs[name].latent, dense.latent), 2)
            for name in ("trajectory_only", "both")
        },
        **used(reports["both"]),
    }


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Speed-ups against dense, and both over the product of each."""
    seconds = found["seconds"]
    gains = {name: seconds["dense"] / s for name, s in seconds.items()}
    product = gains["sparse_only"] * gains["trajectory_only"]
    return {
        "speedup": round(gains["both"], 4),
        "joint_over_product": round(gains["both"] / product, 4),
        "sparse_only": round(gains["sparse_only"], 4),
        "trajectory_only": round(gains["trajectory_only"], 4),
        "composed": found["composed"],
    }


def plot(found: dict[str, Any], path: Path) -> None:
    """Seconds of the four runs as bars."""
    from .bars import DENSE, OURS, figure_of

    figure, axes = figure_of(1, 1, 5.0, 3.2)
    seconds = found["seconds"]
    names = [name.replace("_", " ") for name in seconds]
    bars = axes[0][0].bar(names, seconds.values(), color=[DENSE, OURS, OURS, OURS])
    axes[0][0].bar_label(bars, [f"{seconds['dense'] / s:.2f}x" for s in seconds.values()])
    axes[0][0].margins(y=0.12)
    how = "added up of evaluations" if found["composed"] else "from end to end"
    axes[0][0].set(title=f"{STEPS} steps, {found['tokens']} tokens, {how}", ylabel="seconds")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a narrow model of 1,024 tokens")
    parser.add_argument("--whole", action="store_true", help="all runs from end to end")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    grid, sizes = (SMALL_GRID, SMALL) if options.quick else (GRID, {})
    model = built(layers=options.layers, **sizes)
    # So few tokens do not pay; a back end by name does not ask.
    backend = "gather" if options.quick else "auto"
    found = (whole if options.whole else composed)(model, latent_shape(grid), backend)
    found["tokens"] = grid[0] * grid[1] * grid[2]
    short = summary(found)
    for name, seconds in found["seconds"].items():
        print(f"{name:<16}{seconds:>9.1f} s{found['seconds']['dense'] / seconds:>8.2f}x")
    print(f"both over the product of each: {short['joint_over_product']:.3f}")
    config = {k: v for k, v in model.config.as_dict().items() if k != "patch"}
    data = {"command": command("joint"), "threads": torch.get_num_threads(), "model": config}
    if options.json:
        save(options.json, {**data, "measured": found, "summary": short})
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
