"""Stages of one generation: where one run goes on from the latent that another left behind.

A two-expert model is sampled by two nodes, the first of which leaves its noise to the second. What
the second starts from is then a result, and differs with every changed word; what both
generations share is what their first stages started from. So a latent that a stage left behind is
remembered by its hash, with that *origin*, and the next stage is filed under the origin instead of
the latent. Whether an earlier second stage is a valid guide is judged by its first evaluation, as
everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import torch
from torch import Tensor

from ..carnator.request import Request
from .fingerprint import digest

try:
    from comfy.model_management import intermediate_dtype
except ImportError:  # hosts before 0.18

    def intermediate_dtype() -> torch.dtype:
        return torch.float32


KEPT = 256  # boundaries remembered, each a pair of hashes

_origins: OrderedDict[str, str] = OrderedDict()
_lock = Lock()


def travelling_type() -> torch.dtype:
    """The type of latents between nodes."""
    return intermediate_dtype()


def boundary(latent: Tensor) -> str:
    """Hash of a latent as it travels from one sampler node to the next."""
    return digest(latent.detach().to(travelling_type()))


def left(request: Request, latent: Tensor) -> None:
    """Remember what the run behind a latent started from, unless it was finished."""
    if request.sigmas[-1] <= 0:
        return
    name = boundary(latent)
    with _lock:
        _origins[name] = origin(request)
        _origins.move_to_end(name)
        while len(_origins) > KEPT:
            _origins.popitem(last=False)


def origin(request: Request) -> str:
    """What a run starts from, prompt and model aside: its noise, its latent, its images."""
    return digest([request.hard[name] for name in ("initial", "noise", "conditioning", "latent")])


def continued(noise: Tensor, latent: Tensor) -> tuple[str, str] | None:
    """Hash and origin of the latent a run goes on from without new noise, or None when no stage
    of this session is known to have left it."""
    if torch.count_nonzero(noise) != 0:
        return None
    name = boundary(latent)
    with _lock:
        found = _origins.get(name)
    return None if found is None else (name, found)
