"""One pair: what Carnator does of its own accord, and the curves of every method on it."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carnator.demo import host
from carnator.demo.model import EmbeddedModel
from carnator.recording import load
from carnator.request import Settings
from carnator.store import Store
from carnator.trajectory import Trajectory

from .batch import Pair
from .competitors import Path
from .metrics import Quality
from .pairs import normalised

CARNATOR = "carnator"


class Point(NamedTuple):
    """A method at one setting of its knob; ``evaluations`` are those of a dense run of 30."""

    knob: float
    evaluations: float
    psnr_db: float
    clip_db: float
    ssim: float
    attributes: float
    leakage: float | None

    @classmethod
    def of(cls, knob: float, evaluations: float, steps: int, quality: Quality) -> Point:
        values = (round(v, 4) if v is not None else None for v in asdict(quality).values())
        return cls(knob, round(normalised(evaluations, steps), 3), *values)  # type: ignore[arg-type]


@dataclass
class Measured:
    """``d0``, ``d1`` and ``reason`` are the report's; ``own`` is Carnator's run, ``dense`` the
    target's dense run, ``shown`` the donor's clip taken for the target's. ``curves`` hold a point
    for each knob a method was run at."""

    kind: str
    donor: str
    target: str
    seed: int
    settings: str
    decision: str
    reason: str
    d0: float | None
    d1: float | None
    evaluations: int
    total: int
    own: Point | None = None
    dense: Point | None = None
    shown: Point | None = None
    curves: dict[str, list[Point]] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        return self.decision in ("hit", "exact")

    def as_dict(self) -> dict:
        """Plain data; a point as a list of its values."""
        return asdict(self) | {
            "own": self.own,
            "dense": self.dense,
            "shown": self.shown,
            "curves": self.curves,
        }


@dataclass(frozen=True, eq=False)
class Attempt:
    """A run of Carnator: the budget it was given (dB), its latent, and the evaluations made."""

    budget_db: float
    latent: Tensor
    evaluations: int


@dataclass(frozen=True, eq=False)
class Session:
    """What became of a pair: the donor's run as a path and as a record, the run of the target
    under the preset, and, where that was a hit, those under other budgets."""

    measured: Measured
    donor: Path
    record: Trajectory
    own: Attempt
    others: list[Attempt]


def play(
    base: EmbeddedModel,
    current: EmbeddedModel,
    pair: Pair,
    preset: str,
    budgets: Sequence[float],
) -> Session:
    """Run a pair through Carnator as a user would, with the donor's run alone in the store.

    The donor's run is made by ``base``, the target's by ``current``; ``budgets`` are in dB.
    """
    states: list[Tensor] = []

    def watch(x: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        states.append(x)
        return base.branches(x, *rest, **named)

    watched = copy.copy(base)
    watched.branches = watch  # type: ignore[method-assign]

    def target(settings: Settings) -> host.Result:
        return host.generate(
            current,
            pair.target,
            seed=pair.seed,
            cfg=pair.target_cfg,
            steps=pair.target_steps,
            shift=pair.target_shift,
            settings=settings,
            store=store,
        )

    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        shown = host.generate(
            watched,
            pair.donor,
            seed=pair.seed,
            cfg=pair.donor_cfg,
            steps=pair.donor_steps,
            settings=Settings(preset=preset),
            store=store,
        )
        store.flush()
        (entry,) = store.entries()
        levels = host.simple_sigmas(pair.target_steps, pair.target_shift).tolist()[:-1]
        record, _ = load(store, entry, levels)
        settings = Settings(preset=preset, record=False)
        result = target(settings)
        report = result.report
        assert report is not None
        own = Attempt(settings.budget, result.latent, report.evaluations)
        others = []
        for budget in budgets if report.decision == "hit" else ():
            again = own
            if budget != settings.budget:
                made = target(Settings("custom", budget, record=False))
                assert made.report is not None
                again = Attempt(budget, made.latent, made.report.evaluations)
            others.append(again)
    measured = Measured(
        pair.kind,
        str(pair.donor),
        str(pair.target),
        pair.seed,
        f"cfg {pair.target_cfg:g}, {pair.target_steps} steps, shift {pair.target_shift:g}, "
        f"lora {pair.lora:g}",
        report.decision,
        report.reason,
        report.d0,
        report.d1,
        report.evaluations,
        report.dense_evaluations,
    )
    donor = Path(
        pair.donor,
        pair.donor_steps,
        host.simple_sigmas(pair.donor_steps).tolist(),
        torch.cat([*states, shown.latent]),
    )
    return Session(measured, donor, record, own, others)
