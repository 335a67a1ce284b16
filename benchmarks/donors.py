"""Targets and possible donors that share one noise, and how near they are: ground of the ablation.

A ``Shelf`` holds a few dozen dense runs, as a creator's store would, and a few held-out targets.
For every target one of the runs is of the request it was changed from; the others are those of the
other targets, and of captions drawn at random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from carnator.demo import captions, host
from carnator.demo.captions import Caption
from carnator.demo.model import EmbeddedModel
from carnator.derivative import derivative, relative_deviation
from carnator.ranking import Ranking, smallest
from carnator.recording import Recorder
from carnator.signature import (
    GUIDANCE_GRID,
    LAYOUT_GRID,
    SHORTLIST,
    AttentionProbe,
    signature,
)
from carnator.trajectory import Trajectory

from .batch import WORD_KINDS, Batch, Pair, embedding
from .competitors.case import similarity
from .pairs import CFGS, PAIR_SEED, WORDS, held_out_pairs

CHUNK = 8
PER_KIND = 24  # pairs of each kind of word that calibration keeps clear of


def targets(count: int) -> list[Pair]:
    """Held-out word tweaks, the kinds in turns. Raises ValueError beyond 24 of a kind."""
    if not 1 <= count <= PER_KIND * len(WORD_KINDS):
        raise ValueError(f"{count} targets: use 1 to {PER_KIND * len(WORD_KINDS)}.")
    drawn = held_out_pairs(PAIR_SEED, WORDS, PER_KIND)
    by_kind = [[p for p in drawn if p.kind == kind] for kind in WORD_KINDS]
    return [p for turn in zip_longest(*by_kind) for p in turn][:count]


class Line:
    """Tensors at falling sigmas, linear in sigma between them; below the last one that one."""

    def __init__(self, sigmas: Sequence[float], values: Sequence[Tensor]) -> None:
        self._rising, self._values = np.array(sigmas[::-1]), values[::-1]

    def at(self, sigma: float) -> Tensor:
        place = np.interp(sigma, self._rising, np.arange(len(self._rising)))
        below = min(int(place), len(self._rising) - 2)
        pair = self._values[below : below + 2]
        return torch.lerp(pair[0], pair[1], float(place) - below)


class Exact:
    """A run's derivatives [1, C, ...] as they were made at guidance scale ``cfg``, where
    ``Trajectory`` answers with what the record's coding left of them; cond - uncond of every
    evaluation, not of every few."""

    def __init__(self, guided: Line, guidance: Line, cfg: float) -> None:
        self._guided, self._guidance, self._cfg = guided, guidance, cfg

    def at(self, sigma: float, cfg: float) -> Tensor:
        d = self._guided.at(sigma)
        if cfg == self._cfg:
            return d
        return torch.add(d, self._guidance.at(sigma), alpha=cfg - self._cfg)


def observed(batch: Batch) -> tuple[Tensor, list[Trajectory], list[Exact]]:
    """Dense runs: latents [B, ...], what their records answer, and what they were."""
    cfgs = batch.cfg.flatten().tolist()
    recorders = [Recorder(cfg) for cfg in cfgs]
    guided: list[Tensor] = []
    guidance: list[Tensor] = []
    sigmas: list[float] = []

    def denoise(x: Tensor, sigma: float) -> Tensor:
        parts = batch.branches(x, sigma)
        for i, recorder in enumerate(recorders):
            recorder.add(x[i : i + 1], sigma, *(p[i : i + 1] for p in parts))
        guided.append(derivative(x, parts[0], sigma))
        guidance.append((parts[2] - parts[1]) / sigma)
        sigmas.append(sigma)
        return parts[0]

    latents = batch.run(denoise)

    def line(values: Sequence[Tensor], row: int) -> Line:
        return Line(sigmas, [v[row : row + 1] for v in values])

    exact = [Exact(line(guided, i), line(guidance, i), cfg) for i, cfg in enumerate(cfgs)]
    return latents, [r.trajectory() for r in recorders], exact


class Shelf:
    """``pairs`` are the targets with the requests they were changed from, ``size`` is the number
    of donors; all have the noise of ``seed``.

    ``reference`` [T, ...] are the targets' dense latents, ``records`` and ``exact`` the donors'
    runs, ``d0`` and ``d1`` [T, N] the distances by which Carnator judges, ``likeness`` [T, N] the
    cosines of the prompts' conditionings, ``own`` [T] each target's own request's run.
    """

    def __init__(self, model: EmbeddedModel, pairs: Sequence[Pair], size: int, seed: int) -> None:
        self.model, self.pairs, self.seed = model, list(pairs), seed
        self.donors = captions_for(self.pairs, size, seed)
        self.own = np.array([self.donors.index(p.donor) for p in pairs])
        self.targets = self.batch([p.target for p in pairs])
        self.reference, _, runs = observed(self.targets)
        self.records: list[Trajectory] = []
        self.exact: list[Exact] = []
        for start in range(0, size, CHUNK):
            _, records, exact = observed(self.batch(self.donors[start : start + CHUNK]))
            self.records += records
            self.exact += exact
        first, second = self.targets.calls()[:2]
        self.d0, self.d1 = (self._distances(runs, sigma) for sigma in (first, second))
        self.likeness = np.array([[similarity(p.target, c) for c in self.donors] for p in pairs])

    def batch(self, what: Sequence[Caption], cfgs: Sequence[float] | None = None) -> Batch:
        scales = [host.CFG] * len(what) if cfgs is None else cfgs
        return Batch.of(self.model, what, [self.seed] * len(what), scales, host.STEPS)

    def _distances(self, runs: Sequence[Exact], sigma: float) -> np.ndarray:
        donors = [r.at(sigma, host.CFG) for r in self.records]
        return np.array(
            [[relative_deviation(t.at(sigma, host.CFG), d) for d in donors] for t in runs]
        )

    @cached_property
    def scaled(self) -> tuple[Batch, Tensor]:
        """The donors' own requests at other guidance scales, and their dense latents."""
        cfgs = [CFGS[i % len(CFGS)] for i in range(len(self.pairs))]
        batch = self.batch([p.donor for p in self.pairs], cfgs)
        return batch, batch.dense()[0]

    # Shortlists.

    @cached_property
    def signatures(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Early Signatures of the targets and of the donors."""
        return (
            [self._signature(p.target) for p in self.pairs],
            [self._signature(c) for c in self.donors],
        )

    @torch.no_grad()
    def _signature(self, caption: Caption) -> np.ndarray:
        seen, sigma = AttentionProbe(), self.targets.calls()[0]
        noise = self.targets.noise[:1]
        cond, uncond = embedding(caption)[None], embedding(None)[None]
        positive, negative = self.model.branches(noise, sigma, cond, uncond, seen.see)
        assert negative is not None
        guided = negative + (positive - negative) * host.CFG
        return signature(guided, positive, negative, seen)

    def shortlists(self, kept: np.ndarray | None = None, most: int = SHORTLIST) -> list[list[int]]:
        """For every target the ``most`` donors with the nearest signatures; ``kept`` [K] says
        which numbers of a signature count (default: all)."""
        asked, known = self.signatures
        rows = slice(None) if kept is None else kept
        ranking = Ranking([s[rows] for s in known])
        return [smallest(ranking.distances(s[rows]), most) for s in asked]

    def chosen(self, shortlists: Sequence[Sequence[int]] | None = None) -> np.ndarray:
        """The donor [T] with the least D1 of each shortlist: Carnator's choice."""
        lists = self.shortlists() if shortlists is None else shortlists
        return np.array(
            [min(some, key=d1.__getitem__) for some, d1 in zip(lists, self.d1, strict=True)]
        )


def captions_for(pairs: Sequence[Pair], size: int, seed: int) -> list[Caption]:
    """The donors' captions: those the targets were changed from, then random others, none of them
    a target's. Raises ValueError when they are more than ``size``."""
    rng = random.Random(f"carnator shelf {seed}")
    found = list(dict.fromkeys(p.donor for p in pairs))
    if len(found) > size:
        raise ValueError(f"{size} donors are too few for {len(found)} targets.")
    taken = {p.target for p in pairs}
    if taken & set(found):
        raise ValueError("A target among the donors would be its own donor.")
    while len(found) < size:
        caption = captions.random_caption(rng)
        if caption not in taken and caption not in found:
            found.append(caption)
    return found


def signature_parts(shape: Sequence[int], length: int) -> dict[str, slice]:
    """Where the parts of an Early Signature of ``length`` lie, for latents [1, C, F, H, W]."""
    sizes = [
        shape[1] * math.prod(min(g, n) for g, n in zip(grid, shape[2:], strict=True))
        for grid in (LAYOUT_GRID, GUIDANCE_GRID)
    ]
    sizes += [1, 1, length - sum(sizes) - 2]
    names = ("layout", "guidance", "guidance strength", "strength", "attention")
    ends = np.cumsum(sizes).tolist()
    return {n: slice(end - size, end) for n, end, size in zip(names, ends, sizes, strict=True)}


Choice = Callable[[Shelf], np.ndarray]


def at_random(shelf: Shelf) -> np.ndarray:
    rng = np.random.default_rng(shelf.seed % 2**32)
    return rng.integers(len(shelf.donors), size=len(shelf.pairs))


CHOICES: dict[str, Choice] = {
    "shortlisted by signature, then by D1": lambda s: s.chosen(),
    "random donor": at_random,
    "nearest by text": lambda s: s.likeness.argmax(1),
    "the request it was changed from": lambda s: s.own,
    "best by D0": lambda s: s.d0.argmin(1),
    "best by D1": lambda s: s.d1.argmin(1),
}
