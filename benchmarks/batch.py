"""Many generations in one forward pass: dense runs, and runs under a given plan.

The embedded host makes one clip at a time, as users do; measurements need thousands. The parts
that matter (samplers, recorder, predictor) are the very ones a single run uses.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from carnator.demo import captions, clips, host
from carnator.demo.captions import Caption
from carnator.demo.model import EmbeddedModel
from carnator.derivative import denoised_from, derivative, relative_deviation
from carnator.plan import LATE, Plan, probed, spaced
from carnator.predict import Predictor, schedule_position
from carnator.recording import Recorder
from carnator.samplers import contract
from carnator.trajectory import Trajectory

WORD_KINDS = ("color", "shape", "motion", "background", "count")


def latent_peak(model: EmbeddedModel) -> float:
    """The range that makes the PSNR of a backbone's latent equal to that of its clip: only some
    of its channels hold pixels, whose range is 2."""
    return 2.0 * (model.family.live_channels / model.family.channels) ** 0.5


LATENT_PEAK = 2.0 * (clips.LIVE_CHANNELS / clips.CHANNELS) ** 0.5  # Wan's and HunyuanVideo's
embedding = functools.cache(captions.embed)


@dataclass(frozen=True)
class Pair:
    """A donor's request and a changed one with the same noise. ``kind`` names the change."""

    kind: str
    donor: Caption
    target: Caption
    seed: int
    donor_cfg: float = host.CFG
    target_cfg: float = host.CFG
    donor_steps: int = host.STEPS
    target_steps: int = host.STEPS
    lora: float = 0.0
    target_shift: float = host.SHIFT


def held_out_pairs(seed: int, kinds: Sequence[str], per_kind: int) -> list[Pair]:
    """Pairs whose target caption training never saw, ``per_kind`` of every kind of tweak."""
    rng = random.Random(f"carnator pairs {seed}")
    pairs = []
    for kind in kinds:
        for _ in range(per_kind):
            while True:
                donor = captions.random_caption(rng)
                target = captions.tweak(donor, kind, rng)
                if target.held_out:
                    break
            pairs.append(Pair(kind, donor, target, rng.randrange(2**32)))
    return pairs


class _SeenEnough(Exception):
    """Ends a sampler whose remaining steps nobody needs."""


@dataclass(frozen=True)
class Batch:
    """Requests that share a model, a sampler and a schedule; ``cfg`` is [B, 1, 1, 1, 1]."""

    model: EmbeddedModel
    captions: tuple[Caption, ...]
    noise: Tensor
    cfg: Tensor
    steps: int
    sampler: str = "euler"
    shift: float = host.SHIFT

    @classmethod
    def of(
        cls,
        model: EmbeddedModel,
        what: Sequence[Caption],
        seeds: Sequence[int],
        cfgs: Sequence[float],
        steps: int,
        sampler: str = "euler",
        shift: float = host.SHIFT,
    ) -> Batch:
        noise = torch.cat([host.seed_noise(seed, model.family.shape) for seed in seeds])
        scales = torch.tensor(cfgs).view(-1, 1, 1, 1, 1)
        return cls(model, tuple(what), noise, scales, steps, sampler, shift)

    @property
    def total(self) -> int:
        """Evaluations of a dense run."""
        return host.evaluation_count(self.sampler, self.steps)

    def plan(self, evaluations: int, late: float = LATE) -> Plan:
        """A plan of so many evaluations on this schedule, for own extrapolation."""
        return spaced(self.calls(), evaluations, late)

    def probed_plan(self, evaluations: int, late: float = LATE) -> Plan:
        """A plan of so many evaluations on this schedule, for a donor."""
        return probed(self.calls(), evaluations, late)

    def calls(self) -> list[float]:
        """Noise levels of the evaluations of a dense run."""
        return contract(self.sampler).calls(self.sigmas.tolist())

    @cached_property
    def sigmas(self) -> Tensor:
        """The schedule [steps + 1]."""
        return host.simple_sigmas(self.steps, self.shift)

    def with_steps(self, steps: int) -> Batch:
        return replace(self, steps=steps)

    def select(self, rows: Sequence[int]) -> Batch:
        """The batch of these requests alone."""
        index = torch.as_tensor(rows, dtype=torch.long)
        what = tuple(self.captions[i] for i in index.tolist())
        return replace(self, captions=what, noise=self.noise[index], cfg=self.cfg[index])

    def branches(
        self, x: Tensor, sigma: float, model: EmbeddedModel | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Guided, conditional and unconditional denoised latents at x [B, ...]: one evaluation of
        every request. ``model`` answers instead of the batch's own."""
        cond = torch.stack([embedding(c) for c in self.captions])
        positive, negative = (model or self.model).branches(x, sigma, cond, embedding(None)[None])
        assert negative is not None
        return self.guide(positive, negative), positive, negative

    def guide(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Classifier-free guidance (Ho and Salimans, arXiv:2207.12598)."""
        return negative + (positive - negative) * self.cfg

    @torch.no_grad()
    def run(self, denoise: host.Denoise) -> Tensor:
        """Latents [B, ...] of the sampler over whatever ``denoise`` answers."""
        return host.SAMPLERS[self.sampler](denoise, self.noise, self.sigmas)

    @torch.no_grad()
    def dense(
        self, record: bool = False, watch: Callable[[Tensor], object] | None = None
    ) -> tuple[Tensor, list[Trajectory]]:
        """Latents [B, ...] of dense runs, and their trajectories where they are recorded.

        ``watch`` is shown the latents before every evaluation.
        """
        scales = self.cfg.flatten().tolist()
        recorders = [Recorder(cfg) for cfg in scales] if record else []

        def denoise(x: Tensor, sigma: float) -> Tensor:
            if watch is not None:
                watch(x)
            parts = self.branches(x, sigma)
            for i, recorder in enumerate(recorders):
                recorder.add(x[i : i + 1], sigma, *(p[i : i + 1] for p in parts))
            return parts[0]

        latents = self.run(denoise)
        return latents, [r.trajectory() for r in recorders]

    @torch.no_grad()
    def planned(self, plan: Plan, donors: Sequence[Trajectory] | None) -> tuple[Tensor, Tensor]:
        """Latents [B, ...] of runs under a plan, and the sum [B] over all gaps of (span in sigma
        of the predicted steps * RMS prediction error / 3) squared: what the guard adds up.

        Without donors the runs extrapolate their own derivative.
        """
        predictor = Predictor(
            None if donors is None else lambda s: self._led(donors, s),
            schedule_position(self.sigmas.tolist()),
        )
        call, predicted_from = 0, 0.0
        spent = torch.zeros(len(self.captions))

        def denoise(x: Tensor, sigma: float) -> Tensor:
            nonlocal call, predicted_from
            index, call = call, call + 1
            if index not in plan.evaluated:
                predicted_from = predicted_from or sigma
                return denoised_from(x, predictor.predict(sigma), sigma)
            guided, _, _ = self.branches(x, sigma)
            if index == 0 and donors is not None and 1 in plan.evaluated:
                return guided  # as the engine does: the second evaluation is the first node
            error = predictor.add(sigma, derivative(x, guided, sigma))
            if error is not None and predicted_from:
                spent.add_((predicted_from - sigma) ** 2 / 9 * error.flatten(1).mean(1))
            predicted_from = 0.0
            return guided

        return self.run(denoise), spent

    @torch.no_grad()
    def d1(self, donors: Sequence[Trajectory]) -> list[float]:
        """Relative deviation of each request's second derivative from its donor's, as
        ``carnator.matching`` has it."""
        seen: list[tuple[Tensor, float]] = []

        def denoise(x: Tensor, sigma: float) -> Tensor:
            guided, _, _ = self.branches(x, sigma)
            seen.append((derivative(x, guided, sigma), sigma))
            if len(seen) == 2:
                raise _SeenEnough
            return guided

        with suppress(_SeenEnough):
            self.run(denoise)
        d, sigma = seen[-1]
        led = self._led(donors, sigma)
        return [relative_deviation(a, b) for a, b in zip(d, led, strict=True)]

    def _led(self, donors: Sequence[Trajectory], sigma: float) -> Tensor:
        cfgs = self.cfg.flatten().tolist()
        return torch.cat([d.at(sigma, cfg) for d, cfg in zip(donors, cfgs, strict=True)])


def psnr_each(latents: Tensor, reference: Tensor, peak: float = LATENT_PEAK) -> list[float]:
    """PSNR in dB of each latent [B, ...] against a reference; ``latent_peak`` is the range that
    puts it on the scale of clips."""
    error = (latents.double() - reference.double()).square().flatten(1).mean(1)
    return (10 * torch.log10(peak**2 / error.clamp_min(1e-10))).tolist()
