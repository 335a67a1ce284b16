"""The noise policy ``bank``: which noise a run starts from.

The bank replaces only what is certain to be the plain noise of the seed, at the start of a whole
schedule; structured noise, disabled noise and later stages stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..carnator.noise import bank_index, bank_seed
from ..carnator.request import Request
from .request import full_start


def seed_noise(like: Tensor, seed: int) -> Tensor:
    """The host's plain noise of a seed for latents like these; leaves torch's own state alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like)


def bank_noise(request: Request, noise: Tensor, patcher: Any) -> Tensor | None:
    """The bank's noise for the request's seed, or None where ``noise`` has to stay."""
    if not full_start(patcher, request.sigmas[0]):
        return None
    if not torch.equal(noise, seed_noise(noise, request.seed)):
        return None
    return seed_noise(noise, bank_seed(bank_index(request.seed)))
