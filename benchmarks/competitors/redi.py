"""ReDi: the run's own beginning is the key to a similar run, whose later latent it jumps onto.

Rule: Zhang et al., "ReDi: Efficient Learning-Free Diffusion Inference via Trajectory Retrieval",
ICML 2023, arXiv:2302.02285, and github.com/zkx06111/ReDiffusion, retrieve_redi.py: the first 10 of
50 steps are made, the nearest earlier run by the latent there is retrieved (always one), and the
run goes on from that one's latent at a later step, times the least-squares weight of the two keys.
Their knowledge base shares one noise, as a pair does here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Batch
from .base import Competitor, Outcome, Stepwise
from .case import Case, Path
from .landing import Jump, land

KEY = 0.2  # share of the schedule that is made before retrieval
VALUES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TWICE = 0.7  # the landing at which half of the steps are skipped


class Beginning(Stepwise):
    """Evaluates everything, and stops the work after ``steps`` of it."""

    def __init__(self, batch: Batch, steps: int):
        super().__init__(batch)
        self.steps, self.latents = steps, batch.noise

    def wants(self, x: Tensor, sigma: float) -> Tensor:
        if self.step == self.steps:
            self.latents = x
        return torch.full((len(x),), self.step < self.steps)

    def answer(self, x: Tensor, sigma: float) -> Tensor:
        return x


def key_step(steps: int) -> int:
    return max(1, round(KEY * steps))


def nearest(query: Tensor, keys: list[Tensor]) -> tuple[int, float]:
    """The index of the key nearest to a query, and the least-squares weight w = <k, q> / <k, k>."""
    distances = [float((query - key).square().sum()) for key in keys]
    index = min(range(len(keys)), key=distances.__getitem__)
    key = keys[index]
    return index, float((key * query).sum() / (key * key).sum())


def retrieved(case: Case) -> list[tuple[str, Path, float]]:
    """For each target the run it retrieves (name, path) and the weight, by its own beginning."""
    key = key_step(case.targets.steps)
    sigma = float(case.targets.sigmas[key])
    own = Beginning(case.targets, key)
    own.outcome()
    pool = [i for i, path in enumerate(case.pool.early) if path.covers(sigma)]
    others = [case.pool.early[i].at(sigma) for i in pool]
    found = []
    for query, donor in zip(own.latents, case.donors, strict=True):
        index, weight = nearest(query, [donor.at(sigma), *others])
        if index == 0:
            found.append(("donor", donor, weight))
        else:
            which = pool[index - 1]
            found.append((f"pool {which}", case.pool.path(which), weight))
    return found


def run(case: Case, knob: float) -> Outcome:
    """``knob``: the share of the schedule at which it goes on."""
    if case.retrieved is None:
        case.retrieved = retrieved(case)
    steps = case.targets.steps
    end = min(round(knob * steps), steps - 1)
    return land(
        case,
        [Jump(name, path, end, key_step(steps), w) for name, path, w in case.retrieved],
    )


REDI = Competitor("redi", "ReDi (own early latent)", "arXiv:2302.02285", VALUES, run, TWICE)
