"""What a rule may look at: the targets, the run of each pair's donor, a pool of other runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from carnator.demo import captions
from carnator.demo.captions import Caption
from carnator.demo.host import CFG, STEPS
from carnator.demo.model import EmbeddedModel
from carnator.trajectory import Trajectory

from ..batch import Batch, Pair, embedding

EARLY = 9  # steps of 30 that a pool's run is known for before somebody retrieves it
CHUNK = 8


@dataclass(frozen=True)
class Path:
    """The latents along an earlier run with Euler steps: ``states`` [S, C, ...] at ``sigmas``
    [S], falling. ``steps`` is the length of its schedule."""

    caption: Caption
    steps: int
    sigmas: Sequence[float]
    states: Tensor

    def covers(self, sigma: float) -> bool:
        return self.sigmas[-1] <= sigma <= self.sigmas[0]

    def at(self, sigma: float) -> Tensor:
        """The latent [C, ...] at a noise level: Euler's path is linear in sigma between nodes."""
        if not self.covers(sigma):
            raise ValueError(f"The run is known from {self.sigmas[0]} to {self.sigmas[-1]} only.")
        below = next(i for i, s in enumerate(self.sigmas) if s <= sigma)
        if below == 0:
            return self.states[0]
        high, low = self.sigmas[below - 1], self.sigmas[below]
        return torch.lerp(self.states[below - 1], self.states[below], (high - sigma) / (high - low))


def similarity(a: Caption, b: Caption) -> float:
    """Cosine of two conditionings, all tokens [12, 64] flattened: the text embedding of these
    backbones. 1 for equal prompts, about 0.9 for one changed word, 0.3 to 0.6 for unrelated."""
    return float(torch.cosine_similarity(embedding(a).flatten(), embedding(b).flatten(), dim=0))


def paths(batch: Batch) -> tuple[Tensor, list[Trajectory], list[Path]]:
    """Dense runs of a batch: their latents, trajectories, and paths."""
    seen: list[Tensor] = []
    latents, trajectories = batch.dense(record=True, watch=seen.append)
    states = torch.stack([*seen, latents], 1)
    levels = batch.sigmas.tolist()
    return (
        latents,
        trajectories,
        [Path(c, batch.steps, levels, s) for c, s in zip(batch.captions, states, strict=True)],
    )


class Pool:
    """Other dense runs of the same model that a rule may retrieve from, besides the donor.

    Their captions are random, but for the targets'; their noises are those of the pairs in turn,
    so that each pair meets at least one other run from its own noise where there are enough. Only
    the beginning of each is made at once; who retrieves one gets all of it.
    """

    def __init__(self, model: EmbeddedModel, size: int, pairs: Sequence[Pair], seed: int = 3):
        self.model = model
        rng = random.Random(f"carnator pool {seed}")
        taken = {str(p.target) for p in pairs}
        self.captions: list[Caption] = []
        while len(self.captions) < size:
            caption = captions.random_caption(rng)
            if str(caption) not in taken:
                self.captions.append(caption)
        self.seeds = [pairs[i % len(pairs)].seed for i in range(size)]
        self.early: list[Path] = []
        for start in range(0, size, CHUNK):
            self.early += self._begin(range(start, min(size, start + CHUNK)))
        self._whole: dict[int, Path] = {}

    def __len__(self) -> int:
        return len(self.captions)

    def _batch(self, indices: Sequence[int]) -> Batch:
        return Batch.of(
            self.model,
            [self.captions[i] for i in indices],
            [self.seeds[i] for i in indices],
            [CFG] * len(indices),
            STEPS,
        )

    def _begin(self, indices: Sequence[int]) -> list[Path]:
        batch = self._batch(indices)
        levels = batch.sigmas[: EARLY + 1].tolist()
        x, states = batch.noise, [batch.noise]
        for sigma, after in zip(levels, levels[1:], strict=False):
            with torch.no_grad():
                x = x + (x - batch.branches(x, sigma)[0]) / sigma * (after - sigma)
            states.append(x)
        stacked = torch.stack(states, 1)
        return [Path(c, STEPS, levels, s) for c, s in zip(batch.captions, stacked, strict=True)]

    def path(self, index: int) -> Path:
        """The whole run."""
        if index not in self._whole:
            self._whole[index] = paths(self._batch([index]))[2][0]
        return self._whole[index]


@dataclass
class Case:
    """A batch of targets that share weights and schedule, with their donors' runs.

    ``rescale`` is TeaCache's polynomial for this backbone.
    """

    targets: Batch
    donors: Sequence[Path]
    pool: Pool
    rescale: np.poly1d
    landings: dict[tuple, Tensor] = field(default_factory=dict)  # runs that rules share
    retrieved: list[tuple[str, Path, float]] | None = None  # ReDi's, once it has asked

    def select(self, rows: Sequence[int]) -> Case:
        donors = [self.donors[i] for i in rows]
        return Case(self.targets.select(rows), donors, self.pool, self.rescale)

    def by_text(self, row: int, same_steps: bool = False) -> tuple[str, Path | None, float]:
        """The run whose prompt is most like the target's: its name, its path, the similarity.

        The donor wins ties. ``same_steps`` leaves out runs of another step count.
        """
        target = self.targets.captions[row]
        options: list[tuple[float, int]] = []
        if not same_steps or self.donors[row].steps == self.targets.steps:
            options.append((similarity(target, self.donors[row].caption), -1))
        if not same_steps or self.targets.steps == STEPS:
            options += [(similarity(target, c), i) for i, c in enumerate(self.pool.captions)]
        if not options:
            return "", None, 0.0
        best, index = max(options, key=lambda o: (o[0], -o[1]))
        if index < 0:
            return "donor", self.donors[row], best
        return f"pool {index}", self.pool.path(index), best
