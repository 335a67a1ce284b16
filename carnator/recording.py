"""Between a run and the store: recording a dense run, and loading a donor's part of one."""

from __future__ import annotations

import math
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
        self.tensors: dict[str, Tensor] = {}
        self.branched = True
        self._last: Tensor | None = None

    def add(
        self, x: Tensor, sigma: float, denoised: Tensor, cond: Tensor | None, uncond: Tensor | None
    ) -> None:
        """Record one evaluation at latents x [1, C, ...]. Without observed branches the guided
        result itself is kept, and the whole record counts as not branched."""
        i = len(self.sigmas)
        if cond is None:
            cond, uncond = denoised, None
            self.branched = False
        self.sigmas.append(sigma)
        for name, value in (("cond", cond), ("uncond", uncond)):
            if value is None:
                continue
            d = derivative(x, value, sigma)
            if i == 0:
                self.tensors[f"{name}.first"] = d.detach()[0].to(torch.float16).cpu()
            values, scale = encode(d)
            self.tensors[f"{name}.{i}"] = values
            self.tensors[f"{name}.{i}.scale"] = scale
        self._last = denoised

    def final_rms(self) -> float:
        """Root mean square of the last denoised latent, in model space."""
        return 0.0 if self._last is None else mean_square(self._last) ** 0.5


def first_names(branched: bool) -> list[str]:
    """Names of the tensors that hold the first evaluation exactly."""
    return ["cond.first", "uncond.first"] if branched else ["cond.first"]


def names_at(indices: Sequence[int], branched: bool) -> list[str]:
    """Names of the encoded tensors of some evaluations."""
    parts = ("cond", "uncond") if branched else ("cond",)
    return [f"{p}.{i}{s}" for i in indices for p in parts for s in ("", ".scale")]


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
    )


def parts_of(entry: Entry) -> tuple[str, ...]:
    """Which branches a record holds."""
    branched = bool(entry.meta.get("branched")) and bool(entry.meta.get("guided"))
    return ("cond", "uncond") if branched else ("cond",)


def first_derivative(entry: Entry, store: Store) -> Branches:
    """The donor's first evaluation, branches apart. Raises RecordError."""
    names = [f"{part}.first" for part in parts_of(entry)]
    tensors = store.read(entry.id, names)
    return Branches(*(tensors[name].float()[None] for name in names))


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
    sigmas, parts = [float(s) for s in entry.meta["sigmas"]], parts_of(entry)
    indices = needed(sigmas, targets)
    names = {
        f"{part}.{i}{tail}": f"{part}.{new}{tail}"
        for new, i in enumerate(indices)
        for part in parts
        for tail in ("", ".scale")
    }
    extra = list(extra)
    tensors = store.read(entry.id, [*names, *extra])
    shape = list(entry.meta["shape"])[1:]
    for name in names:
        expected = shape[:1] + [1] * (len(shape) - 1) if name.endswith(".scale") else shape
        if list(tensors[name].shape) != expected:
            raise ValueError(
                f"The record {entry.id} holds {name} of shape {list(tensors[name].shape)} where "
                f"{expected} belongs."
            )
    path = Trajectory(
        [sigmas[i] for i in indices],
        {new: tensors[old] for old, new in names.items()},
        len(parts) == 2,
    )
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
        "guided": "uncond.0" in recorder.tensors,
        "rms": recorder.final_rms(),
        "seconds": seconds,
    }
    tensors = {**recorder.tensors, "final": latent.detach().float().cpu().clone()}
    return Draft(request.partition, request.identity, meta, tensors, signature)
