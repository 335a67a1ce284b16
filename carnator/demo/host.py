"""The embedded host: schedule, samplers and guidance around the tiny backbones.

It mirrors ComfyUI number for number (same noise, same "simple" schedule, same k-diffusion form
of the samplers), so that a run here and a run there give the same latent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..engine import Run
from ..matching import may_use_bank_noise
from ..noise import bank_index, bank_seed
from ..report import Report
from ..request import Evaluation, Request, Settings, tensor_digest
from ..store import Store
from .captions import Caption, embed
from .families import WAN
from .model import EmbeddedModel

STEPS = 30
CFG = 4.0
SHIFT = 5.0
SHAPE = WAN.shape
TABLE = 1000  # entries of the host's table of noise levels

Denoise = Callable[[Tensor, float], Tensor]


def simple_sigmas(steps: int, shift: float = SHIFT) -> Tensor:
    """Noise levels [steps + 1] of the "simple" schedule, falling from 1 to 0.

    Every (1000 / steps)-th entry, from the top, of the table sigma(t) = s t / (1 + (s - 1) t)
    with t = 1/1000 ... 1 (Esser et al., arXiv:2403.03206, eq. 23), then 0.
    """
    if not 1 <= steps <= TABLE:
        raise ValueError(f"Steps must be from 1 to {TABLE}, not {steps}.")
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"Shift must be a positive number, not {shift}.")
    # Through timesteps 1..1000 and back, because the host rounds to float32 on that way.
    t = torch.arange(1, TABLE + 1) / TABLE * 1000 / 1000
    table = shift * t / (1 + (shift - 1) * t) if shift != 1 else t
    picked = [float(table[-1 - int(i * TABLE / steps)]) for i in range(steps)]
    return torch.tensor([*picked, 0.0])


def seed_noise(seed: int, shape: Sequence[int] = SHAPE) -> Tensor:
    """The noise of a latent's shape that the host makes from a seed, 0 <= seed < 2**64."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"The seed must be from 0 to 2**64 - 1, not {seed}.")
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def euler(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """Euler steps of dx/ds = (x - denoised) / s (Karras et al., arXiv:2206.00364, algorithm 2
    without churn and without the second-order correction)."""
    for s, following in pairwise(sigmas):
        x = x + (x - denoise(x, float(s))) / s * (following - s)
    return x


def heun(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """Heun's steps, the last one Euler's (Karras et al., arXiv:2206.00364, algorithm 2)."""
    for s, following in pairwise(sigmas):
        d = (x - denoise(x, float(s))) / s
        ahead = x + d * (following - s)
        if following == 0:
            return ahead
        d_ahead = (ahead - denoise(ahead, float(following))) / following
        x = x + (d + d_ahead) / 2 * (following - s)
    return x


def dpmpp_2m(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """DPM-Solver++(2M) (Lu et al., arXiv:2211.01095, algorithm 2) with lambda = -log s, alpha = 1.

    First step and the step to 0 are first order, as in the host.
    """
    times = -sigmas.log()
    previous: Tensor | None = None
    for i in range(len(sigmas) - 1):
        denoised = denoise(x, float(sigmas[i]))
        h = times[i + 1] - times[i]
        towards = denoised
        if previous is not None and sigmas[i + 1] > 0:
            half_ratio = h / (times[i] - times[i - 1]) / 2
            towards = (1 + half_ratio) * denoised - half_ratio * previous
        x = (sigmas[i + 1] / sigmas[i]) * x - torch.expm1(-h) * towards
        previous = denoised
    return x


SAMPLERS: dict[str, Callable[[Denoise, Tensor, Tensor], Tensor]] = {
    "euler": euler,
    "heun": heun,
    "dpmpp_2m": dpmpp_2m,
}


def evaluation_count(sampler: str, steps: int) -> int:
    """How often ``sampler`` asks for ``denoised`` in a run of ``steps`` steps."""
    return 2 * steps - 1 if sampler == "heun" else steps


@dataclass
class Result:
    """What a generation gives back.

    ``latent`` has the shape of the model's family, ``clip`` is [3, 4, 32, 32] in [-1, 1],
    ``noise`` what the run started from. ``seconds`` spans the sampler: from before the first
    evaluation to after the last, matching and predictions included, background recording not.
    ``calls`` counts the model's forward passes. ``report`` is None for a run without Carnator.
    """

    latent: Tensor
    clip: Tensor
    noise: Tensor
    seconds: float
    calls: int
    report: Report | None = None


def make_request(
    model: EmbeddedModel,
    caption: Caption,
    noise: Tensor,
    *,
    cfg: float,
    sigmas: Sequence[float],
    seed: int,
    sampler: str,
) -> Request:
    """Everything Carnator has to know about a generation before its first evaluation."""
    hard = {
        "latent": f"{model.family.name} {tuple(noise.shape)}",
        "prediction": "flow",
        "initial": "empty",
        "image": "none",
        "stage": "full",
        "noise": tensor_digest(noise),
    }
    soft = {
        "prompt": str(caption),
        "negative": "",
        "weights": model.fingerprint,
        "cfg": repr(cfg),
        "sampler": sampler,
        "schedule": repr(list(sigmas)),
    }
    labels = {"prompt": str(caption), "model": model.name}
    return Request(hard, soft, model.architecture, sampler, tuple(sigmas), cfg, seed, labels)


@torch.no_grad()
def generate(
    model: EmbeddedModel,
    caption: Caption,
    *,
    seed: int = 0,
    noise: Tensor | None = None,
    cfg: float = CFG,
    steps: int = STEPS,
    shift: float = SHIFT,
    sampler: str = "euler",
    settings: Settings | None = None,
    store: Store | None = None,
    progress: Callable[[int], object] | None = None,
) -> Result:
    """Make the clip of a caption.

    Without ``settings`` this is a plain run that Carnator takes no part in. ``noise`` replaces
    the noise that the seed and the settings' noise policy give. ``progress`` is called with 1
    after every step's derivative, predicted or evaluated.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"Unknown sampler {sampler!r}: use one of {', '.join(SAMPLERS)}.")
    if not (math.isfinite(cfg) and cfg > 0):
        raise ValueError(f"CFG must be a positive number, not {cfg}.")
    sigmas = simple_sigmas(steps, shift)
    levels = sigmas.tolist()
    cond = embed(caption)[None]
    uncond = None if cfg == 1 else embed(None)[None]
    first_call = model.calls
    shape = model.family.shape

    def asked(noise: Tensor) -> Request:
        return make_request(
            model, caption, noise, cfg=cfg, sigmas=levels, seed=seed, sampler=sampler
        )

    began = time.perf_counter()
    if noise is None and settings is not None and settings.noise_policy == "bank":
        noise = seed_noise(bank_seed(bank_index(seed)), shape)
        if not may_use_bank_noise(asked(noise), store):
            noise = None
    noise = seed_noise(seed, shape) if noise is None else noise
    run = None if settings is None else Run(settings, asked(noise), store)

    def denoise(x: Tensor, sigma: float) -> Tensor:
        def evaluate() -> Evaluation:
            observe = run.attention if run is not None and run.wants_attention else None
            override = None
            if run is not None:
                override = run.connectivity.override(model.token_layout, x.shape)
            positive, negative = model.branches(x, sigma, cond, uncond, observe, override)
            if negative is None:
                return Evaluation(positive, positive, None)
            return Evaluation(negative + (positive - negative) * cfg, positive, negative)

        out = evaluate().denoised if run is None else run.denoise(x, sigma, evaluate)
        if progress is not None:
            progress(1)
        return out

    finished = False
    try:
        latent = SAMPLERS[sampler](denoise, noise, sigmas)
        if run is not None:
            latent = run.finish(latent)
        finished = True
    finally:
        if run is not None and not finished:
            run.abandon("the run was interrupted")
    seconds = time.perf_counter() - began
    report = None if run is None else run.report
    calls = model.calls - first_call
    return Result(latent, model.family.to_clip(latent[0]), noise, seconds, calls, report)
