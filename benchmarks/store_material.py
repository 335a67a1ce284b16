"""What the store's benchmark works on: real trajectories of the bundled model, tiled to the size of
a real one, and many small records."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from carnator.demo import captions, host
from carnator.demo.model import EmbeddedModel
from carnator.derivative import derivative
from carnator.recording import Recorder, draft
from carnator.request import Evaluation, Probe, Request
from carnator.signature import signature
from carnator.store import Draft, Store

from .batch import Batch, Pair, held_out_pairs, psnr_each

# Wan 2.1 1.3B at 480p and 81 frames: latent [1, 16, 21, 60, 104].
WAN = (1, 16, 21, 60, 104)
CFG = 6.0
STEPS = 30
SIGNATURE = 402  # numbers of an Early Signature of Wan
SEED = 5


@dataclass(frozen=True)
class Step:
    """One evaluation of a batch of runs: latents [B, ...] and what the model made of them."""

    sigma: float
    x: Tensor
    guided: Tensor
    cond: Tensor
    uncond: Tensor


def steps_of(made: Batch) -> tuple[Tensor, list[Step]]:
    """Dense runs: their latents [B, ...], and every evaluation."""
    seen: list[Step] = []

    def denoise(x: Tensor, sigma: float) -> Tensor:
        parts = made.branches(x, sigma)
        seen.append(Step(float(sigma), x.clone(), *(p.clone() for p in parts)))
        return parts[0]

    return made.run(denoise), seen


def some_runs(model: EmbeddedModel, count: int) -> list[Step]:
    """Evaluations of ``count`` dense runs of different captions and seeds, side by side."""
    pairs = held_out_pairs(SEED, ("unrelated",), count)
    made = Batch.of(model, [p.target for p in pairs], range(count), [CFG] * count, STEPS)
    return steps_of(made)[1]


def tiled(latents: Tensor, shape: tuple[int, ...] = WAN) -> Tensor:
    """Latents [B, C, f, h, w] side by side until they fill ``shape`` [1, C, F, H, W]: the same
    pattern every time, so that what is smooth along a run stays so."""
    counts = [-(-wanted // have) for wanted, have in zip(shape[2:], latents.shape[2:], strict=True)]
    order = torch.Generator().manual_seed(SEED)
    chosen = torch.randint(len(latents), counts, generator=order)
    grid = latents[chosen].permute(3, 0, 4, 1, 5, 2, 6)  # C, F, f, H, h, W, w
    whole = grid.reshape(latents.shape[1], *(c * n for c, n in zip(counts, latents.shape[2:])))
    return whole[None, :, : shape[2], : shape[3], : shape[4]].contiguous()


def request(identity: int, cfg: float = CFG, sigmas: Sequence[float] = ()) -> Request:
    return Request(
        hard={"latent": "wan"},
        soft={"prompt": str(identity)},
        architecture="wan",
        sampler="euler",
        sigmas=tuple(sigmas) or tuple(host.simple_sigmas(STEPS, host.SHIFT).tolist()),
        cfg=cfg,
        seed=identity,
        labels={"prompt": f"a request made by the benchmark, number {identity}"},
    )


def big_record(model: EmbeddedModel, runs: int) -> tuple[Draft, dict[str, float]]:
    """The encoded record of a run at WAN's size, and what that took in milliseconds: per
    evaluation during the run, and in the background after it."""
    recorder, spent = Recorder(CFG), 0.0
    steps = some_runs(model, runs)
    for step in steps:
        parts = [tiled(t) for t in (step.x, step.guided, step.cond, step.uncond)]
        began = time.perf_counter()
        recorder.add(parts[0], step.sigma, *parts[1:])
        spent += time.perf_counter() - began
    final = tiled(steps[-1].guided)
    made = draft(request(0), recorder, WAN, final, 300.0, np.zeros(SIGNATURE, np.float16))
    assert isinstance(made, Draft) and made.encode is not None
    began = time.perf_counter()
    made = replace(made, tensors=made.encode(), encode=None)
    encoding = time.perf_counter() - began
    return made, {
        "recording_ms_per_evaluation": round(1000 * spent / len(steps), 1),
        "encoding_ms": round(1000 * encoding, 1),
    }


def numbered(made: Draft, number: int) -> Draft:
    """The same record of another request."""
    return replace(made, identity=request(number).identity)


# Many small records.


@dataclass
class Library:
    """A store filled with records of one partition that hold what matching looks at."""

    store: Store
    model: EmbeddedModel
    rng: np.random.Generator

    def __post_init__(self) -> None:
        made = Batch.of(self.model, [captions.parse("red circle left on gray")], [3], [CFG], STEPS)
        _, (step, *_) = steps_of(made)
        self.sigmas = made.sigmas.tolist()
        evaluation = Evaluation(step.guided, step.cond, step.uncond)
        made_of = signature(step.guided, step.cond, step.uncond).astype(np.float32)
        self.center = np.resize(made_of, SIGNATURE)
        d = derivative(step.x, torch.cat([step.cond, step.uncond]), step.sigma)
        self.first = d.half()
        self.shape = list(step.x.shape)
        self.probe = Probe(
            request(0, sigmas=self.sigmas), step.x, step.sigma, evaluation, self._signature()
        )

    def _signature(self) -> np.ndarray:
        return (self.center * (1 + 0.1 * self.rng.standard_normal(SIGNATURE))).astype(np.float16)

    def draft(self, number: int) -> Draft:
        """A record whose first derivative is a little off the probe's."""
        asked = request(number, sigmas=self.sigmas)
        noise = torch.from_numpy(self.rng.standard_normal(self.first.shape).astype(np.float16))
        meta = {
            "sampler": "euler",
            "sigmas": self.sigmas[:-1],
            "cfg": CFG,
            "seed": number,
            "twin": asked.twin,
            "architecture": asked.architecture,
            "label": asked.labels["prompt"],
            "labels": dict(asked.labels),
            "shape": self.shape,
            "branched": True,
            "rms": 1.0,
            "seconds": 1.0,
            "guidance": [0],
        }
        tensors = {"first": self.first + 0.1 * noise}
        return Draft(asked.partition, asked.identity, meta, tensors, self._signature())

    def grow(self, count: int) -> Iterator[None]:
        """Fill up to ``count`` records, one at a time; not waiting for the disk."""
        for number in range(len(self.store.shelf(self.probe.request.partition)) + 1, count + 1):
            with unsynced():
                self.store.put(self.draft(number))
            yield


@contextmanager
def unsynced() -> Iterator[None]:
    """``os.fsync`` does nothing: only for filling, never for what is measured."""
    fsync, os.fsync = os.fsync, lambda _: None
    try:
        yield
    finally:
        os.fsync = fsync


# What the coding costs.


class Exact:
    """A donor as it was, nothing rounded."""

    def __init__(self, steps: Sequence[Step], row: int, cfg: float) -> None:
        self._cfg = cfg
        self._nodes = {
            step.sigma: (
                derivative(step.x, step.guided, step.sigma)[row][None],
                (step.uncond - step.cond)[row][None] / step.sigma,
            )
            for step in steps
        }

    def at(self, sigma: float, cfg: float) -> Tensor:
        nearest = min(self._nodes, key=lambda s: abs(s - sigma))
        d, guidance = self._nodes[nearest]
        return d + (cfg - self._cfg) * guidance


def coding_loss(
    model: EmbeddedModel, pairs: Sequence[Pair], evaluations: int, target_cfg: float
) -> list[float]:
    """Decibels lost per pair between exact and recorded donors: PSNR of a run of so many
    evaluations against its own dense run."""
    cfg, seeds = host.CFG, [p.seed for p in pairs]
    donors = Batch.of(model, [p.donor for p in pairs], seeds, [cfg] * len(pairs), STEPS)
    _, steps = steps_of(donors)
    recorders = [Recorder(cfg) for _ in pairs]
    for step in steps:
        for i, recorder in enumerate(recorders):
            row = slice(i, i + 1)
            parts = (step.guided[row], step.cond[row], step.uncond[row])
            recorder.add(step.x[row], step.sigma, *parts)
    target = Batch.of(model, [p.target for p in pairs], seeds, [target_cfg] * len(pairs), STEPS)
    dense, _ = target.dense()
    plan = target.probed_plan(evaluations)
    exact = [Exact(steps, i, cfg) for i in range(len(pairs))]
    recorded = [r.trajectory() for r in recorders]
    best, got = (
        psnr_each(target.planned(plan, path)[0], dense)  # type: ignore[arg-type]
        for path in (exact, recorded)
    )
    return [a - b for a, b in zip(best, got, strict=True)]


def coding_pairs(count: int) -> list[Pair]:
    """Compatible tweaks, where the donor matters most."""
    return held_out_pairs(SEED, ("shape", "motion"), max(1, count // 2))
