"""What a training run of an embedded backbone depends on besides the code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Length, batch, rate and seed of a training run.

    The rate warms up, stays, and falls to a fiftieth over the last ``decay_share`` of the steps
    (warmup-stable-decay), so that a checkpoint from before the decay can be trained on to any
    other length. ``restarts`` are the steps where such a decay had ended and the rate rose once
    more. ``ema`` is the decay of the averaged weights, ``drop_caption`` the share of captions
    replaced by the empty one for classifier-free guidance.
    """

    steps: int = 4_000
    restarts: tuple[int, ...] = ()
    batch: int = 12
    rate: float = 1.5e-3
    warmup: int = 200
    decay_share: float = 0.25
    ema: float = 0.999
    drop_caption: float = 0.1
    seed: int = 0

    def decay_from(self, step: int) -> int:
        """The step at which the decay that ``step`` leads up to, or is part of, begins."""
        end = self._end(step)
        return end - int(end * self.decay_share)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, 0 <= step < steps."""
        end = self._end(step)
        left = max(0.02, (end - step) / max(1, int(end * self.decay_share)))
        return self.rate * min(1.0, (step + 1) / self.warmup, left)

    def _end(self, step: int) -> int:
        return next(e for e in (*self.restarts, self.steps) if step < e)
