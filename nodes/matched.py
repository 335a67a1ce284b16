"""What travels between the pipeline nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..carnator.matching import Match
from ..carnator.request import Evaluation, Probe, Request, Settings
from .request import differences

if TYPE_CHECKING:
    from .host import StoreChoice


@dataclass(frozen=True)
class Verdict:
    """A match, and what it was made with: the sampler goes on with the same."""

    match: Match
    settings: Settings
    store: StoreChoice


class ProbeMismatch(ValueError):
    """A probe was handed to a run it does not belong to."""


def moved(probe: Probe, device: Any) -> Probe:
    """A copy of a probe with its tensors on a device; a sampler may write into what it gets."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, copy=True)

    def evaluated(e: Evaluation) -> Evaluation:
        branches = [None if b is None else copied(b) for b in (e.cond, e.uncond)]
        return Evaluation(copied(e.denoised), *branches)

    second = probe.second
    if second is not None:
        second = replace(second, x=copied(second.x), evaluation=evaluated(second.evaluation))
    return replace(probe, x=copied(probe.x), evaluation=evaluated(probe.evaluation), second=second)


def check_probe(probe: Probe, request: Request) -> None:
    """Raise ProbeMismatch when a probe was made by another run than this one."""
    wrong = differences(probe.request, request)
    if wrong:
        raise ProbeMismatch(
            f"The probe behind this scope belongs to another run: {', '.join(wrong)} differ. "
            "Connect the same noise, guider, sampler, sigmas and latent to Carnator Probe and to "
            "this sampler."
        )
