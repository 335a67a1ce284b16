"""Predicting the derivative at a step that is not evaluated.

Two predictors. The *donor* one takes the donor's derivative as control variate and carries on only
the difference ``D = d_t - d_s`` met at the evaluated nodes. The *own* one extrapolates the
target's derivative itself. Both are linear in the position along the target's schedule, in which
steps are equally spaced. Each evaluation measures both, per token, and sets the weights of their
mix for the next gap; the map of weights is the reuse scope: 1 where the donor is trusted, 0 where
the target goes its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .trajectory import same_sigma

Donor = Callable[[float], Tensor]


def schedule_position(sigmas: Sequence[float]) -> Callable[[float], float]:
    """A function from sigma to the (fractional) step of a falling schedule."""
    rising = np.asarray(sigmas, dtype=np.float64)[::-1]
    steps = np.arange(len(rising), dtype=np.float64)[::-1]
    return lambda sigma: float(np.interp(sigma, rising, steps))


def token_error(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared difference over channels, smoothed over 3x3x3 tokens: [B, C, F, H, W] to
    [B, 1, F, H, W]. Image latents [B, C, H, W] are smoothed over 3x3, and an axis of one or two
    tokens is not smoothed."""
    error = (a - b).square().mean(1, keepdim=True)
    pool = F.avg_pool3d if error.ndim == 5 else F.avg_pool2d
    size = [3 if n >= 3 else 1 for n in error.shape[2:]]
    return pool(error, size, 1, [n // 2 for n in size], count_include_pad=False)


class Predictor:
    """The evaluated nodes of one target run, and what they say about the steps in between.

    Args:
        donor: the donor's guided derivative [1, C, ...] at a sigma, on the target's device, or
            None for own extrapolation alone.
        position: where on the schedule a sigma lies (``schedule_position``).
        mix: weigh both predictors per token; False uses the donor's alone.
    """

    def __init__(
        self,
        donor: Donor | None,
        position: Callable[[float], float],
        *,
        mix: bool = True,
    ):
        self.donor, self.position = donor, position
        self.mix = mix and donor is not None
        self.weight: Tensor | None = None  # [B, 1, F, H, W] in 0..1
        self._sigmas: list[float] = []
        self._own_nodes: list[Tensor] = []  # d_t
        self._led_nodes: list[Tensor] = []  # D

    def add(self, sigma: float, d: Tensor) -> Tensor | None:
        """Take an evaluated derivative d [B, C, ...]; returns the squared error per token
        [B, 1, ...] of what would have been predicted here, or None at the first node."""
        error = None
        if self._sigmas:
            own, led = self._own(sigma), self._led(sigma)
            error = token_error(d, self._join(own, led))
            if self.mix:
                self.weight = mix_weight(token_error(d, own), token_error(d, led))
        same = bool(self._sigmas) and same_sigma(self._sigmas[-1], sigma)
        keep = slice(0, -1) if same else slice(-1, None)
        self._sigmas = [*self._sigmas[keep], sigma]
        self._own_nodes = [*self._own_nodes[keep], d]
        if self.donor is not None:
            self._led_nodes = [*self._led_nodes[keep], d - self.donor(sigma)]
        return error

    def predict(self, sigma: float) -> Tensor:
        """The expected derivative [B, C, ...] at a sigma below the last evaluated node."""
        if not self._sigmas:
            raise ValueError("Nothing can be predicted before the first evaluation.")
        if self.donor is None:
            return self._own(sigma)
        if self.weight is None:
            return self._led(sigma)
        return self._join(self._own(sigma), self._led(sigma))

    def _join(self, own: Tensor, led: Tensor) -> Tensor:
        if self.donor is None:
            return own
        return led if self.weight is None else torch.lerp(own, led, self.weight)

    def _own(self, sigma: float) -> Tensor:
        return self._extrapolate(sigma, self._own_nodes)

    def _led(self, sigma: float) -> Tensor:
        if self.donor is None:
            return self._own(sigma)
        return self._extrapolate(sigma, self._led_nodes) + self.donor(sigma)

    def _extrapolate(self, sigma: float, values: list[Tensor]) -> Tensor:
        """Linear extrapolation of what was met at the last two evaluated nodes."""
        if len(values) < 2:
            return values[-1]
        start, end = (self.position(s) for s in self._sigmas)
        ahead = (self.position(sigma) - start) / (end - start)
        return torch.lerp(values[0], values[1], ahead)


def mix_weight(own: Tensor, led: Tensor) -> Tensor:
    """Weight of the donor's predictor from both predictors' squared errors: e_own^2 / (e_own^2 +
    e_donor^2), the inverse-error weighting of two estimates sharpened once more."""
    own, led = own.square(), led.square()
    return own / (own + led).clamp_min(1e-30)
