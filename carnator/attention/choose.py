"""Which back end serves a call, and whether block-sparse attention pays at all.

Expected time over dense attention's is ``per_density * density + fixed / tokens``: the kept
blocks at a back end's own efficiency, and what it does per block of queries whatever the mask;
both grow a little for heads narrower than 128. On a CPU the constants were measured (``python -m
benchmarks.attention``), and the choice is the same every time. On other devices they are guesses
that keep clear of the border, and an override times the first call of every kind against dense
attention (``Trials``), once per process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import flex, fused
from .blocks import KeyLists

BACKENDS = ("auto", "dense", "gather", "flex", "fused")
# Sparse attention is taken where it is expected to need at most this share of dense time.
MARGIN = 0.9
REFERENCE_DIM, NARROW_POWER = 128, 0.2
DENSITY_STEPS = 20


@dataclass(frozen=True)
class Cost:
    """A back end's time relative to dense attention, for heads of 128: per unit of density, and
    over the number of tokens."""

    per_density: float
    fixed: float

    def expected(self, density: float, tokens: int, head_dim: int) -> float:
        narrow = max(1.0, REFERENCE_DIM / head_dim) ** NARROW_POWER
        return (self.per_density * density + self.fixed / tokens) * narrow


COSTS = {
    ("cpu", "gather"): Cost(1.45, 280.0),
    # Guesses. Compiling flex_attention for a CPU takes longer than it saves, so it is not here.
    ("cuda", "fused"): Cost(1.6, 2500.0),
    ("cuda", "flex"): Cost(1.8, 2500.0),
    ("other", "gather"): Cost(2.5, 5000.0),
}


def ranked(q: Tensor, k: Tensor, v: Tensor, lists: KeyLists) -> list[str]:
    """The back ends that are expected to be faster than dense attention, the fastest first."""
    return paying(q, k, v, lists.block, lists.density)


def paying(q: Tensor, k: Tensor, v: Tensor, block: int, density: float) -> list[str]:
    """The same for any mask of a density, which need not be there yet."""
    device = q.device.type if q.device.type in ("cpu", "cuda") else "other"
    if k.shape[2] < 2 * block:
        return []
    expected = {
        name: cost.expected(density, k.shape[2], q.shape[-1])
        for (where, name), cost in COSTS.items()
        if where == device and _is_there(name, q, k, v, block)
    }
    worth = [name for name, share in expected.items() if share <= MARGIN]
    return sorted(worth, key=lambda name: expected[name])


def _is_there(name: str, q: Tensor, k: Tensor, v: Tensor, block: int) -> bool:
    if name == "flex":
        return flex.available(q)
    return name != "fused" or fused.available(q, k, v, block)


class Trials:
    """Timed once per kind of call: is the sparse back end really faster than dense attention?

    For devices whose constants are guesses, and for hosts whose dense attention is another than
    torch's. ``clock`` reads seconds after all work on the device is done.
    """

    def __init__(self, clock: Callable[[torch.device], float] | None = None):
        self._clock = clock or _finished
        self._pays: dict[tuple[object, ...], bool] = {}

    def key(self, q: Tensor, lists: KeyLists, *kind: object) -> tuple[object, ...]:
        """What calls must have in common to share a verdict."""
        density = round(lists.density * DENSITY_STEPS)
        return (q.device, q.dtype, tuple(q.shape), lists.block, density, *kind)

    def verdict(self, key: tuple[object, ...]) -> bool | None:
        """Whether sparse attention pays for calls of this kind; None before a trial."""
        return self._pays.get(key)

    def run(
        self,
        key: tuple[object, ...],
        device: torch.device,
        dense: Callable[[], Tensor],
        sparse: Callable[[], Tensor],
    ) -> Tensor:
        """Make both once to warm up and once timed; returns the faster one's result."""
        results, seconds = [], []
        for make in (dense, sparse):
            make()
            began = self._clock(device)
            results.append(make())
            seconds.append(self._clock(device) - began)
        self._pays[key] = seconds[1] < seconds[0]
        return results[self._pays[key]]


def _finished(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
