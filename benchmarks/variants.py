"""Carnator's predictor and plan with one thing changed, for the ablation.

The first variant of every part is the form that is shipped; the others differ from it in what their
name says, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from carnator.demo import host
from carnator.derivative import denoised_from, derivative
from carnator.plan import LATE, Plan
from carnator.predict import Donor, Predictor, mix_weight, schedule_position, token_error
from carnator.trajectory import Trajectory

from .batch import Batch
from .donors import CHOICES, Choice, Exact, Shelf

Position = Callable[[float], float]


class Predicts(Protocol):
    def add(self, sigma: float, d: Tensor) -> object: ...
    def predict(self, sigma: float) -> Tensor: ...


class HeldDifference(Predictor):
    """The difference to the donor stays what it was at the last evaluation."""

    def _led(self, sigma: float) -> Tensor:
        return self._own(sigma) if self.donor is None else self._led_nodes[-1] + self.donor(sigma)


class HeldOwn(Predictor):
    """The own derivative stays what it was at the last evaluation."""

    def _own(self, sigma: float) -> Tensor:
        return self._own_nodes[-1]


class Sloped(Predictor):
    """Both slopes are taken ``slope`` times as steep as they were met."""

    def __init__(self, *args: Any, slope: float, **how: Any) -> None:
        super().__init__(*args, **how)
        self.slope = slope

    def _extrapolate(self, sigma: float, values: list[Tensor]) -> Tensor:
        ahead = super()._extrapolate(sigma, values)
        return torch.lerp(values[-1], ahead, self.slope)


class Quadratic(Predictor):
    """The difference and the own derivative go on as the parabola through the last three
    evaluations (Lagrange), where there are three."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._before: dict[int, tuple[float, Tensor]] = {}  # by which list of nodes it left

    def add(self, sigma: float, d: Tensor) -> Tensor | None:
        leaving = [
            (which, self._sigmas[0], nodes[0])
            for which, nodes in enumerate((self._own_nodes, self._led_nodes))
            if len(nodes) == 2
        ]
        error = super().add(sigma, d)
        self._before.update({which: (s, node) for which, s, node in leaving})
        return error

    def _extrapolate(self, sigma: float, values: list[Tensor]) -> Tensor:
        which = 0 if values is self._own_nodes else 1
        if which not in self._before or len(values) < 2:
            return super()._extrapolate(sigma, values)
        first, node = self._before[which]
        x = [self.position(s) for s in (first, *self._sigmas)]
        at, total = self.position(sigma), torch.zeros_like(node)
        for i, value in enumerate((node, *values)):
            others = [x[j] for j in range(3) if j != i]
            total += value * float(np.prod([(at - o) / (x[i] - o) for o in others]))
        return total


class EvenMix(Predictor):
    """Both predictors count the same, everywhere."""

    def add(self, sigma: float, d: Tensor) -> Tensor | None:
        error = super().add(sigma, d)
        if self.weight is not None:
            self.weight = torch.full_like(self.weight, 0.5)
        return error


class ClipMix(Predictor):
    """One weight for a whole clip, by the errors of both predictors over all of it."""

    def add(self, sigma: float, d: Tensor) -> Tensor | None:
        weight = None
        if self._sigmas:
            own, led = (
                token_error(d, value).mean((1, 2, 3, 4), keepdim=True)
                for value in (self._own(sigma), self._led(sigma))
            )
            weight = mix_weight(own, led)
        error = super().add(sigma, d)
        if self.weight is not None and weight is not None:
            self.weight = weight.expand_as(self.weight)
        return error


class Several:
    """Own extrapolation and several donors, weighed per token by the inverse square of the squared
    errors they made last time (``mix_weight`` for more than two). Before there is an error of a
    prediction, the donors are weighed by their own distance from the target."""

    def __init__(self, donors: Sequence[Donor], position: Position) -> None:
        self._donors = list(donors)
        self._each = [Predictor(None, position)]
        self._each += [Predictor(donor, position, mix=False) for donor in donors]
        self.weights: Tensor | None = None  # [1 + donors, B, 1, F, H, W], adding up to 1

    def add(self, sigma: float, d: Tensor) -> None:
        if self.weights is None:
            apart = [token_error(d, donor(sigma)) for donor in self._donors]
            shares = inverse_squares(torch.stack(apart))
            self.weights = torch.cat([torch.zeros_like(shares[:1]), shares])
        else:
            missed = [token_error(d, p.predict(sigma)) for p in self._each]
            self.weights = inverse_squares(torch.stack(missed))
        for predictor in self._each:
            predictor.add(sigma, d)

    def predict(self, sigma: float) -> Tensor:
        if self.weights is None:
            raise ValueError("Nothing can be predicted before the first evaluation.")
        parts = torch.stack([p.predict(sigma) for p in self._each])
        return (parts * self.weights).sum(0)


def inverse_squares(errors: Tensor) -> Tensor:
    """Weights along the first axis, adding up to 1, from squared errors."""
    inverse = 1 / errors.double().square().clamp_min(1e-30)
    return (inverse / inverse.sum(0)).float()


@torch.no_grad()
def follow(batch: Batch, plan: Plan, predictor: Predicts, start: int = 1) -> Tensor:
    """Latents [B, ...] of runs under a plan. The predictor is shown the evaluations from call
    ``start`` on."""
    call = 0

    def denoise(x: Tensor, sigma: float) -> Tensor:
        nonlocal call
        index, call = call, call + 1
        if index not in plan.evaluated:
            return denoised_from(x, predictor.predict(sigma), sigma)
        guided, _, _ = batch.branches(x, sigma)
        if index >= start:
            predictor.add(sigma, derivative(x, guided, sigma))
        return guided

    return batch.run(denoise)


@dataclass(frozen=True)
class Variant:
    """One row of the ablation: ``run`` gives the latents of a shelf's targets for a number of
    evaluations and the donors [T] that are shipped."""

    part: str
    name: str
    run: Callable[[Shelf, int, np.ndarray], Tensor]


def by_step(batch: Batch) -> Position:
    return schedule_position(batch.sigmas.tolist())


def led_by(runs: Sequence[Trajectory | Exact], cfgs: Sequence[float] | None = None) -> Donor:
    """The donors' guided derivatives [T, ...] at a sigma, and at guidance scales of their own."""
    scales = [host.CFG] * len(runs) if cfgs is None else cfgs
    return lambda s: torch.cat([r.at(s, cfg) for r, cfg in zip(runs, scales, strict=True)])


def recorded(shelf: Shelf, donors: np.ndarray) -> Donor:
    """What the records of the donors [T] answer."""
    return led_by([shelf.records[i] for i in donors])


def predicted(
    shelf: Shelf,
    count: int,
    donors: np.ndarray,
    kind: Callable[..., Predictor] = Predictor,
    **how: bool,
) -> Tensor:
    """The shipped plan with some predictor."""
    made = kind(recorded(shelf, donors), by_step(shelf.targets), **how)
    return follow(shelf.targets, shelf.targets.probed_plan(count), made)


def chosen(choice: Choice, shelf: Shelf, count: int, donors: np.ndarray) -> Tensor:  # noqa: ARG001
    return predicted(shelf, count, choice(shelf))


def own_alone(shelf: Shelf, count: int, donors: np.ndarray) -> Tensor:  # noqa: ARG001
    batch = shelf.targets
    return follow(batch, batch.plan(count), Predictor(None, by_step(batch)), start=0)


def spaced_by(late: float, shelf: Shelf, count: int, donors: np.ndarray) -> Tensor:
    made = Predictor(recorded(shelf, donors), by_step(shelf.targets))
    return follow(shelf.targets, shelf.targets.probed_plan(count, late), made)


def by_rounding(shelf: Shelf, count: int, donors: np.ndarray) -> Tensor:
    """Gaps of the blend of steps and a quarter of sigma, each rounded on its own: their lengths
    go up and down."""
    batch = shelf.targets
    calls = np.asarray(batch.calls()[1:])
    last = len(calls) - 1
    place = 0.75 * np.arange(len(calls)) / last + 0.25 * (calls[0] - calls) / (calls[0] - calls[-1])
    wanted = np.linspace(0, 1, count - 1)
    marks = {int(np.abs(place - w).argmin()) + 1 for w in wanted}
    made = Predictor(recorded(shelf, donors), by_step(batch))
    return follow(batch, Plan(len(calls) + 1, frozenset({0, *marks})), made)


def over_sigma(shelf: Shelf, count: int, donors: np.ndarray) -> Tensor:
    made = Predictor(recorded(shelf, donors), lambda sigma: -sigma)
    return follow(shelf.targets, shelf.targets.probed_plan(count), made)


def from_first(shelf: Shelf, count: int, donors: np.ndarray, second: bool = True) -> Tensor:
    """``second`` evaluates the second step too."""
    batch = shelf.targets
    made = Predictor(recorded(shelf, donors), by_step(batch))
    plan = batch.probed_plan(count) if second else batch.plan(count)
    return follow(batch, plan, made, start=0)


def several(shelf: Shelf, count: int, donors: np.ndarray) -> Tensor:  # noqa: ARG001
    """The three donors with the least D1."""
    nearest = shelf.d1.argsort(1)[:, :3]
    made = Several([recorded(shelf, nearest[:, k]) for k in range(3)], by_step(shelf.targets))
    return follow(shelf.targets, shelf.targets.probed_plan(count), made)


def uncoded(shelf: Shelf, count: int, donors: np.ndarray) -> Tensor:
    made = Predictor(led_by([shelf.exact[i] for i in donors]), by_step(shelf.targets))
    return follow(shelf.targets, shelf.targets.probed_plan(count), made)


def rescaled(apart: bool, exact: bool, shelf: Shelf, count: int, donors: np.ndarray) -> Tensor:  # noqa: ARG001
    """The donors' requests at another guidance scale, with their runs brought to it or not."""
    batch, _ = shelf.scaled
    cfgs = batch.cfg.flatten().tolist() if apart else None
    runs: list[Any] = shelf.exact if exact else shelf.records
    made = Predictor(led_by([runs[i] for i in shelf.own], cfgs), by_step(batch))
    return follow(batch, batch.probed_plan(count), made)


GUIDANCE = "guidance, CFG changes"
LATES = (LATE, *(late for late in (0.0, 0.35, 1.0) if late != LATE))
VARIANTS = [
    *(Variant("donor", name, partial(chosen, choice)) for name, choice in CHOICES.items()),
    Variant("predictor", "per-token mix", predicted),
    Variant("predictor", "mix off: even mean", partial(predicted, kind=EvenMix)),
    Variant("predictor", "mix off: one weight a clip", partial(predicted, kind=ClipMix)),
    Variant("predictor", "own extrapolation off: donor alone", partial(predicted, mix=False)),
    Variant("predictor", "own derivative held", partial(predicted, kind=HeldOwn)),
    Variant("predictor", "difference held", partial(predicted, kind=HeldDifference)),
    Variant("predictor", "slopes 0.8 times", partial(predicted, kind=partial(Sloped, slope=0.8))),
    Variant("predictor", "slopes 1.2 times", partial(predicted, kind=partial(Sloped, slope=1.2))),
    Variant("predictor", "parabola through three", partial(predicted, kind=Quadratic)),
    Variant("predictor", "donor off: own extrapolation alone", own_alone),
    Variant("donors", "one", predicted),
    Variant("donors", "three by D1, inverse-error weights", several),
    *(Variant("spacing", f"late {late:g}", partial(spaced_by, late)) for late in LATES),
    Variant("spacing", "each gap rounded on its own", by_rounding),
    Variant("extrapolation", "over schedule position", predicted),
    Variant("extrapolation", "over sigma", over_sigma),
    Variant("first node", "second evaluation", predicted),
    Variant("first node", "first evaluation", from_first),
    Variant("first node", "first, no second evaluation", partial(from_first, second=False)),
    Variant("record", "4-bit changes and int8", predicted),
    Variant("record", "exact derivatives", uncoded),
    Variant(GUIDANCE, "apart", partial(rescaled, True, False)),
    Variant(GUIDANCE, "not apart", partial(rescaled, False, False)),
    Variant(GUIDANCE, "apart, exact, of every evaluation", partial(rescaled, True, True)),
]
