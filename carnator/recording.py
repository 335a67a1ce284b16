"""Between a run and the store: recording a dense run, and loading a donor's part of one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .derivative import Branches, derivative, mean_square
from .request import Request
from .store import Draft, Entry, Store
from .trajectory import Trajectory, encode, same_sigma


class Recorder:
    """Collects the derivatives of a dense run as it goes, already encoded, on the CPU.

    The first evaluation is kept in float16: it decides D0 and recognises a repeated request.
    """

    def __init__(self) -> None:
        self.sigmas: list[float] = []
        self.values: list[Tensor] = []  # int8 [P, C, ...], P guidance branches
        self.scales: list[Tensor] = []  # [P, C]
        self.first: Tensor | None = None  # float16 [P, C, ...]
        self.branched = True  # the guidance branches were observed
        self.whole = True  # every evaluation gave the same branches
        self._rms = 0.0

    def add(
        self, x: Tensor, sigma: float, denoised: Tensor, cond: Tensor | None, uncond: Tensor | None
    ) -> None:
        """Record one evaluation at latents x [1, C, ...]. Without observed branches the guided
        result itself is kept, and the whole record counts as not branched."""
        parts = [denoised] if cond is None else [cond] if uncond is None else [cond, uncond]
        d = derivative(x, torch.cat(parts), sigma)
        if self.first is None:
            self.first = d.detach().to(torch.float16).cpu()
            self.branched = cond is not None
        self.whole &= len(d) == len(self.first) and self.branched == (cond is not None)
        values, scales = encode(d)
        self.sigmas.append(sigma)
        self.values.append(values)
        self.scales.append(scales)
        self._rms = mean_square(denoised) ** 0.5  # now: the sampler may write into denoised

    def trajectory(self) -> Trajectory:
        """The recorded run as a donor answers for it."""
        return Trajectory(self.sigmas, self.values, self.scales)

    def tensors(self) -> dict[str, Tensor]:
        """What the store keeps: ``d.I`` per evaluation, ``scales`` [S, P, C], ``first``."""
        if self.first is None:
            return {}
        named = {f"d.{i}": value for i, value in enumerate(self.values)}
        return {**named, "scales": torch.stack(self.scales), "first": self.first}

    def final_rms(self) -> float:
        """Root mean square of the last denoised latent, in model space."""
        return self._rms


def sound(entry: Entry) -> bool:
    """Whether what a record says of itself can be worked with; records are untrusted input."""
    meta = entry.meta
    sigmas, shape = meta.get("sigmas"), meta.get("shape")
    return (
        isinstance(sigmas, list)
        and len(sigmas) >= 2
        and all(type(s) is float and math.isfinite(s) and s > 0 for s in sigmas)
        and all(a >= b for a, b in pairwise(sigmas))
        and isinstance(shape, list)
        and len(shape) in (4, 5)
        and isinstance(meta.get("rms"), float)
        and isinstance(meta.get("cfg"), float)
    )


def name_of(entry: Entry) -> str:
    """What to call a record in front of a person: its prompt where the host knows it."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created))
    return str(entry.meta.get("label") or "") or f"seed {entry.meta.get('seed')}, made {when}"


def first_derivative(entry: Entry, store: Store) -> Branches:
    """The donor's first evaluation, branches apart. Raises RecordError."""
    first = store.read(entry.id, ["first"])["first"].float()
    return Branches(*first[:2].split(1))


def needed(sigmas: Sequence[float], targets: Sequence[float]) -> list[int]:
    """Indices of the recorded evaluations a target with these sigmas may ask for."""
    low, high = min(targets), max(targets)
    inside = [i for i, s in enumerate(sigmas) if low <= s <= high or same_sigma(s, high)]
    if not inside:
        return list(range(len(sigmas)))
    first, last = min(inside), max(inside)
    return list(range(max(0, first - 1), min(len(sigmas), last + 2)))


def load(
    store: Store, entry: Entry, targets: Sequence[float], extra: Iterable[str] = ()
) -> tuple[Trajectory, Mapping[str, Tensor]]:
    """The part of a record that answers for ``targets`` (sigmas), and further named tensors.

    Raises RecordError when the record is corrupt, and ValueError when its parts do not fit.
    """
    sigmas = [float(s) for s in entry.meta["sigmas"]]
    indices = needed(sigmas, targets)
    extra = list(extra)
    tensors = store.read(entry.id, [*(f"d.{i}" for i in indices), "scales", *extra])
    values, scales = [tensors[f"d.{i}"] for i in indices], tensors["scales"]
    branches = scales.shape[1] if scales.ndim == 3 else 0
    shape = [branches, *entry.meta["shape"][1:]]
    fits = branches in (1, 2) and list(scales.shape) == [len(sigmas), *shape[:2]]
    if not fits or any(list(v.shape) != shape or v.dtype != torch.int8 for v in values):
        raise ValueError(f"the parts of record {entry.id} do not fit each other")
    path = Trajectory([sigmas[i] for i in indices], values, [scales[i] for i in indices])
    return path, {name: tensors[name] for name in extra}


def draft(
    request: Request,
    recorder: Recorder,
    shape: tuple[int, ...],
    latent: Tensor,
    seconds: float,
    signature: np.ndarray,
) -> Draft | str:
    """What the store is to keep of a dense run, or why it is not kept.

    ``latent`` is the final latent as the host hands it out; an exact hit returns it.
    """
    if len(recorder.sigmas) < 2 or len(shape) not in (4, 5) or shape[0] != 1:
        return "only whole runs of one clip are"
    if not recorder.whole:
        return "its guidance could not be taken apart in the same way at every step"
    if not bool(torch.isfinite(latent).all()):
        return "the result holds values that are not finite"
    meta = {
        "sampler": request.sampler,
        "sigmas": recorder.sigmas,
        "cfg": request.cfg,
        "seed": request.seed,
        "twin": request.twin,
        "architecture": request.architecture,
        "label": request.labels.get("prompt", ""),
        "labels": dict(request.labels),
        "shape": list(shape),
        "branched": recorder.branched,
        "rms": recorder.final_rms(),
        "seconds": seconds,
    }
    tensors = {**recorder.tensors(), "final": latent.detach().float().cpu().clone()}
    return Draft(request.partition, request.identity, meta, tensors, signature)
