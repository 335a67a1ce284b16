"""Many generations in one forward pass: dense runs, and runs under a given plan.

The embedded host makes one clip at a time, as users do; measurements need thousands. The parts
that matter (samplers, recorder, predictor) are the very ones a single run uses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from carnator.demo import captions, clips, host
from carnator.demo.captions import Caption
from carnator.demo.model import EmbeddedModel
from carnator.derivative import denoised_from, derivative, relative_deviation
from carnator.plan import LATE, Plan, spaced
from carnator.predict import Predictor, schedule_position
from carnator.recording import Recorder
from carnator.samplers import contract
from carnator.trajectory import Trajectory

WORD_KINDS = ("color", "shape", "motion", "background", "count")
# Of 16 latent channels 12 hold pixels of range 2, so that this range makes the PSNR of a latent
# equal to that of its clip.
LATENT_PEAK = 2.0 * (clips.LIVE_CHANNELS / clips.CHANNELS) ** 0.5


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
    ) -> Batch:
        noise = torch.cat([host.seed_noise(seed) for seed in seeds])
        return cls(
            model, tuple(what), noise, torch.tensor(cfgs).view(-1, 1, 1, 1, 1), steps, sampler
        )

    @property
    def total(self) -> int:
        """Evaluations of a dense run."""
        return host.evaluation_count(self.sampler, self.steps)

    def plan(self, evaluations: int, late: float = LATE) -> Plan:
        """A plan of so many evaluations on this schedule."""
        calls = contract(self.sampler).calls(self._sigmas().tolist())
        return spaced(calls, evaluations, late)

    def with_steps(self, steps: int) -> Batch:
        return replace(self, steps=steps)

    def _branches(self, x: Tensor, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
        cond = torch.stack([captions.embed(c) for c in self.captions])
        positive, negative = self.model.branches(x, sigma, cond, captions.embed(None)[None])
        assert negative is not None
        return negative + (positive - negative) * self.cfg, positive, negative

    @torch.no_grad()
    def dense(self, record: bool = False) -> tuple[Tensor, list[Trajectory]]:
        """Latents [B, ...] of dense runs, and their trajectories where they are recorded."""
        recorders = [Recorder() for _ in self.captions] if record else []

        def denoise(x: Tensor, sigma: float) -> Tensor:
            parts = self._branches(x, sigma)
            for i, recorder in enumerate(recorders):
                recorder.add(x[i : i + 1], sigma, *(p[i : i + 1] for p in parts))
            return parts[0]

        latents = host.SAMPLERS[self.sampler](denoise, self.noise, self._sigmas())
        return latents, [r.trajectory() for r in recorders]

    @torch.no_grad()
    def planned(self, plan: Plan, donors: Sequence[Trajectory] | None) -> tuple[Tensor, Tensor]:
        """Latents [B, ...] of runs under a plan, and the sum [B] over all gaps of (span in sigma
        of the predicted steps * RMS prediction error / 3) squared: what the guard adds up.

        Without donors the runs extrapolate their own derivative.
        """
        sigmas = self._sigmas()
        predictor = Predictor(
            None if donors is None else lambda s: self._led(donors, s),
            schedule_position(sigmas.tolist()),
        )
        call, predicted_from = 0, 0.0
        spent = torch.zeros(len(self.captions))

        def denoise(x: Tensor, sigma: float) -> Tensor:
            nonlocal call, predicted_from
            index, call = call, call + 1
            if index not in plan.evaluated:
                predicted_from = predicted_from or sigma
                return denoised_from(x, predictor.predict(sigma), sigma)
            guided, _, _ = self._branches(x, sigma)
            error = predictor.add(sigma, derivative(x, guided, sigma))
            if error is not None and predicted_from:
                spent.add_((predicted_from - sigma) ** 2 / 9 * error.flatten(1).mean(1))
            predicted_from = 0.0
            return guided

        latents = host.SAMPLERS[self.sampler](denoise, self.noise, sigmas)
        return latents, spent

    @torch.no_grad()
    def d0(self, donors: Sequence[Trajectory], donor_cfgs: Sequence[float]) -> list[float]:
        """Relative deviation of each request's first derivative from its donor's, recombined at
        the request's CFG or as it was, whichever is larger (as ``carnator.matching`` has it)."""
        sigma = float(self._sigmas()[0])
        guided, _, _ = self._branches(self.noise, sigma)
        first = derivative(self.noise, guided, sigma)
        led = self._led(donors, sigma)
        own = torch.cat([d.at(sigma, cfg) for d, cfg in zip(donors, donor_cfgs, strict=True)])
        return [
            max(relative_deviation(a, b), relative_deviation(a, c))
            for a, b, c in zip(first, led, own, strict=True)
        ]

    def _led(self, donors: Sequence[Trajectory], sigma: float) -> Tensor:
        cfgs = self.cfg.flatten().tolist()
        return torch.cat([d.at(sigma, cfg) for d, cfg in zip(donors, cfgs, strict=True)])

    def _sigmas(self) -> Tensor:
        return host.simple_sigmas(self.steps, self.shift)


def psnr_each(latents: Tensor, reference: Tensor) -> list[float]:
    """PSNR in dB of each latent [B, ...] against a reference, on the scale of clips."""
    error = (latents.double() - reference.double()).square().flatten(1).mean(1)
    return (10 * torch.log10(LATENT_PEAK**2 / error.clamp_min(1e-10))).tolist()
