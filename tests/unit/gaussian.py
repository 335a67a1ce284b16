"""A closed-form flow model for tests: data is N(mean, spread^2) around a mean set by the prompt."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from carnator.engine import Run
from carnator.request import Evaluation, Request, Settings
from carnator.risk import RiskTable, Row

SHAPE = (1, 4, 3, 6, 6)
_ROWS = tuple(
    Row(n, 0.5, ((-4.0, db + 32, db + 31, db + 31), (0.0, db, db - 1, db - 1)))
    for n, db in ((6, 22.0), (8, 25.0), (10, 27.0), (12, 29.0))
)
_KINDS = {f"{k}{c}": _ROWS for k in ("single", "multistep") for c in ("", "+cfg", "+schedule")}
TABLE = RiskTable("gaussian", "gaussian", None, 1.0, 1.0, _KINDS)


def prompt_mean(seed: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def denoised(x: Tensor, sigma: float, mean: Tensor, spread: float = 0.5) -> Tensor:
    """E[x0 | x] for x = (1 - sigma) x0 + sigma n."""
    gain = spread**2 * (1 - sigma) / ((1 - sigma) ** 2 * spread**2 + sigma**2)
    return mean + gain * (x - (1 - sigma) * mean)


class Model:
    """Counts its calls; guides between a conditional and an unconditional mean."""

    def __init__(self, mean: Tensor, cfg: float = 1.0, uncond: Tensor | None = None):
        self.mean, self.cfg = mean, cfg
        self.uncond = torch.zeros_like(mean) if uncond is None else uncond
        self.calls = 0

    def __call__(self, x: Tensor, sigma: float) -> Evaluation:
        self.calls += 1
        cond = denoised(x, sigma, self.mean)
        if self.cfg == 1.0:
            return Evaluation(cond, cond)
        uncond = denoised(x, sigma, self.uncond)
        return Evaluation(torch.lerp(uncond, cond, self.cfg), cond, uncond)


def schedule(steps: int = 20, shift: float = 5.0) -> tuple[float, ...]:
    t = [1 - i / steps for i in range(steps + 1)]
    return tuple(shift * a / (1 + (shift - 1) * a) for a in t)


def noise(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1000 + seed))


def request(prompt: str, *, seed: int = 0, cfg: float = 1.0, sigmas=None, **changes) -> Request:
    values = {
        "hard": {"shape": str(SHAPE), "noise": str(seed), "model": "gaussian"},
        "soft": {"prompt": prompt, "cfg": str(cfg), "sigmas": str(sigmas)},
        "architecture": "gaussian",
        "sampler": "euler",
        "sigmas": tuple(sigmas or schedule()),
        "cfg": cfg,
        "seed": seed,
        "labels": {"prompt": prompt},
    }
    return Request(**{**values, **changes})


def euler(ask, x: Tensor, sigmas) -> Tensor:
    """Euler's method over ``ask(x, sigma) -> denoised``."""
    for now, after in zip(sigmas[:-1], sigmas[1:], strict=True):
        x = x + (after - now) * (x - ask(x, now)) / now
    return x


def sample(run, model: Model, x: Tensor, sigmas) -> Tensor:
    """One whole Euler run driven by the engine."""
    ask = lambda x, s: run.denoise(x, s, lambda: model(x, s))  # noqa: E731
    return run.finish(euler(ask, x, sigmas))


def dense(model: Model, x: Tensor, sigmas) -> Tensor:
    """What the model gives without Carnator."""
    return euler(lambda x, s: model(x, s).denoised, x, sigmas)


def db(a: Tensor, b: Tensor) -> float:
    """PSNR of two latents, peak 2."""
    return 10 * math.log10(4 / float((a - b).square().mean()))


def generate(store, prompt, mean, *, settings=None, cfg=1.0, seed=0, sigmas=None, **changes):
    """One request through the engine: (latent, run, model calls)."""
    sigmas = sigmas or schedule()
    run = Run(
        settings or Settings(), request(prompt, cfg=cfg, seed=seed, sigmas=sigmas, **changes), store
    )
    model = Model(mean, cfg)
    latent = sample(run, model, noise(seed), sigmas)
    store.flush()
    return latent, run, model.calls
