"""The pairs of requests that ``benchmarks.fidelity`` measures: held-out tweaks, stratified by kind.

A donor's request and a changed one share the noise. Words change (colour, shape, motion,
background, count, all of them), or the prompt stays and CFG, step count, shift or weights change.
Every target caption is one that training never saw and that ``benchmarks.calibrate`` leaves out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from carnator.demo import host

from .batch import WORD_KINDS, Pair, held_out_pairs

PAIR_SEED = 1
WORDS = (*WORD_KINDS, "unrelated")
KINDS = (*WORDS, "cfg", "steps", "shift", "lora")
PER_KIND = 24  # pairs of each kind of word tweak that calibration keeps clear of
CFGS = (3.0, 5.0, 3.5, 6.0)
STEP_COUNTS = (24, 40, 20)
SHIFTS = (3.0, 8.0, 4.0)
LORAS = (0.05, 0.1, 0.03)  # change of the block matrices relative to their norm
CHUNK = 8


def stratified(total: int, seed: int = PAIR_SEED) -> list[Pair]:
    """``total`` pairs, as many of each kind as of any other but for one; the pairs of a shorter
    list are also in a longer one. Raises ValueError beyond 24 of a kind."""
    if not 1 <= total <= PER_KIND * len(KINDS):
        raise ValueError(f"{total} pairs cannot be drawn: use 1 to {PER_KIND * len(KINDS)}.")
    words = held_out_pairs(seed, WORDS, PER_KIND)
    by_kind = {kind: [p for p in words if p.kind == kind] for kind in WORDS}
    rng = random.Random(f"carnator settings {seed}")
    captions = sorted({p.target for p in words}, key=str)
    for kind in KINDS[len(WORDS) :]:
        drawn = rng.sample(captions, PER_KIND)
        by_kind[kind] = [
            Pair(kind, caption, caption, rng.randrange(2**32), **changed(kind, i))
            for i, caption in enumerate(drawn)
        ]
    share, more = divmod(total, len(KINDS))
    return [p for i, kind in enumerate(KINDS) for p in by_kind[kind][: share + (i < more)]]


def changed(kind: str, index: int) -> dict[str, Any]:
    """What the target of the ``index``-th pair of a kind has instead of the donor's settings."""
    if kind == "cfg":
        return {"target_cfg": CFGS[index % len(CFGS)]}
    if kind == "steps":
        return {"target_steps": STEP_COUNTS[index % len(STEP_COUNTS)]}
    if kind == "shift":
        return {"target_shift": SHIFTS[index % len(SHIFTS)]}
    return {"lora": LORAS[index % len(LORAS)]}


def chunks(pairs: Sequence[Pair], size: int = CHUNK) -> Iterator[list[Pair]]:
    """The pairs in groups of at most ``size`` whose targets share weights and schedule."""
    groups: dict[tuple[int, float, float], list[Pair]] = {}
    for pair in pairs:
        key = (pair.target_steps, pair.target_shift, pair.lora)
        groups.setdefault(key, []).append(pair)
    for group in groups.values():
        for i in range(0, len(group), size):
            yield group[i : i + size]


def normalised(evaluations: float, steps: int) -> float:
    """Evaluations as if the dense run had 30 of them."""
    return evaluations * host.STEPS / steps
