"""The reports of the last runs of this process: small data for the Report node, no run state."""

from __future__ import annotations

from collections import deque
from threading import Lock

import comfy.utils
from torch import Tensor

from ..carnator.report import Report
from .fingerprint import Digest
from .stages import travelling_type

KEPT = 32

_recent: deque[tuple[str, Report]] = deque(maxlen=KEPT)
_lock = Lock()


def remember(report: Report, latent: Tensor | None) -> None:
    """Keep the report of the run that gave a latent (None: the run failed)."""
    with _lock:
        _recent.append(("" if latent is None else _name(latent), report))


def find(latent: Tensor | None) -> Report | None:
    """The report of the run that gave this latent; the last report when no run is known to have."""
    with _lock:
        recent = list(_recent)
    if latent is not None:
        wanted = _name(latent)
        for name, report in reversed(recent):
            if name == wanted:
                return report
    return recent[-1][1] if recent else None


def _name(latent: Tensor) -> str:
    """Hash of a latent, whether it is still as the sampler gave it or as the node hands it on:
    packs taken apart, and in the type that travels between nodes."""
    if getattr(latent, "is_nested", False):
        latent, _ = comfy.utils.pack_latents(latent.unbind())
    return Digest(sampled=True).add(latent.to(travelling_type())).hex
