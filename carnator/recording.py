"""Between a run and the store: recording a dense run, and loading a donor's part of one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .coding import Encoder, encode_alone, fits
from .derivative import Branches, derivative, mean_square
from .request import Request
from .store import PREVIEW, Draft, Entry, Store, make_preview
from .trajectory import Path, Trajectory

log = logging.getLogger("carnator")
# Guidance changes fast at first and slowly then. Between the evaluations at which it is kept it is
# interpolated, and coded coarsely: of its errors only the part counts by which CFG differs.
GUIDANCE_EARLY = (1, 2)
GUIDANCE_EVERY = 4  # evaluations


class Recorder:
    """Collects the derivatives of a dense run as it goes, in float16 on the CPU; ``tensors`` then
    encodes them, which takes longer and can wait for the background.

    The first evaluation keeps its guidance branches apart: it decides D0 and recognises a repeated
    request. Of the others the guided derivative is kept, and the guidance itself (cond - uncond)
    at every few, for targets with another guidance scale than ``cfg``.
    """

    def __init__(self, cfg: float = 1.0) -> None:
        self.sigmas: list[float] = []
        self.first: Tensor | None = None  # float16 [P, C, ...], P guidance branches
        self.branched = True  # the guidance branches were observed
        self.whole = True  # every evaluation gave the same branches
        self._cfg = cfg
        self._rms = 0.0
        self._guided: list[Tensor] = []  # float16 [1, C, ...] of all evaluations but the first
        self._guidance: dict[int, Tensor] = {}  # the same of some, by evaluation
        self._latest: Tensor | None = None  # of an evaluation whose guidance is not kept

    def add(
        self, x: Tensor, sigma: float, denoised: Tensor, cond: Tensor | None, uncond: Tensor | None
    ) -> None:
        """Record one evaluation at latents x [1, C, ...]. Without observed branches the guided
        result itself is kept, and the whole record counts as not branched."""
        parts = [denoised] if cond is None else [cond] if uncond is None else [cond, uncond]
        d = derivative(x, torch.cat(parts), sigma).detach()
        self._rms = mean_square(denoised) ** 0.5  # now: the sampler may write into denoised
        self.sigmas.append(sigma)
        if self.first is None:
            self.first, self.branched = d.to(torch.float16).cpu(), cond is not None
            return
        self.whole &= len(d) == len(self.first) and self.branched == (cond is not None)
        branches = Branches(*d.split(1))
        self._guided.append(branches.at(self._cfg).to(torch.float16).cpu())
        self._latest = d if branches.uncond is not None else None
        call = len(self.sigmas) - 1
        if call in GUIDANCE_EARLY or call % GUIDANCE_EVERY == 0:
            self._keep_latest()

    def _keep_latest(self) -> None:
        if self._latest is not None:
            cond, uncond = self._latest
            self._guidance[len(self.sigmas) - 1] = (cond - uncond)[None].to(torch.float16).cpu()
            self._latest = None

    def trajectory(self) -> Trajectory:
        """The recorded run as a donor answers for it."""
        if self.first is None:
            raise ValueError("Nothing was recorded.")
        return trajectory(self.tensors(), list(self.sigmas), self._cfg, self.marks())

    def marks(self) -> list[int]:
        """Indices of the evaluations whose guidance is kept; none without guidance."""
        self._keep_latest()
        return [0, *self._guidance] if self.first is not None and len(self.first) > 1 else []

    def held(self) -> dict[str, Tensor]:
        """What the recorder holds in memory, under any names."""
        named = {f"d.{i}": d for i, d in enumerate(self._guided)}
        named.update({f"g.{i}": d for i, d in self._guidance.items()})
        return named if self.first is None else {**named, "first": self.first}

    def tensors(self) -> dict[str, Tensor]:
        """What the store keeps: ``first``, ``d.I`` per later evaluation, and ``g.I`` per later
        evaluation whose guidance is kept."""
        if self.first is None:
            return {}
        marks, named = self.marks(), {"first": self.first}
        branches = Branches(*self.first.float().split(1))
        guided = Encoder(branches.at(self._cfg))
        for i, d in enumerate(self._guided):
            named[f"d.{i + 1}"] = guided.add(d.float())
        named.update({f"g.{i}": encode_alone(self._guidance[i].float()) for i in marks[1:]})
        return named

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


def needed(sigmas: Sequence[float], targets: Sequence[float]) -> int:
    """How many of the recorded evaluations a target with these sigmas may ask for. Always the
    first ones: each is encoded as a change from the one before."""
    low = min(targets)
    return next((i + 1 for i, s in enumerate(sigmas) if s <= low), len(sigmas))


def needed_marks(entry: Entry, count: int) -> list[int]:
    """The evaluations with guidance kept among the first ``count``, and the next one."""
    marks, most = entry.meta.get("guidance"), len(entry.meta["sigmas"])
    if not isinstance(marks, list) or not all(type(i) is int for i in marks):
        marks = [-1]
    if marks[:1] not in ([], [0]) or any(a >= b for a, b in pairwise([*marks, most])):
        raise ValueError(f"record {entry.id} says nothing sound of its guidance")
    return marks[: sum(i < count for i in marks) + 1]


def trajectory(
    tensors: Mapping[str, Tensor],
    sigmas: Sequence[float],
    cfg: float,
    marks: Sequence[int],
    count: int | None = None,
) -> Trajectory:
    """A trajectory from what ``Recorder.tensors`` gave, or from the first ``count`` derivatives of
    it and the guidance at ``marks``. Raises ValueError when the parts do not fit each other."""
    first = tensors["first"]
    if len(first) not in (1, 2) or first.dtype != torch.float16:
        raise ValueError("the first derivative of a record has not the expected form")
    branches = Branches(*first.float().split(1))

    def path(kind: str, start: Tensor, places: Sequence[int]) -> Path:
        encoded = [tensors[f"{kind}.{i}"] for i in places[1:]]
        if not all(fits(data, start.shape) for data in encoded):
            raise ValueError(f"the derivatives {kind!r} of a record do not fit each other")
        return Path([sigmas[i] for i in places], start, encoded, chained=kind == "d")

    guided = path("d", branches.at(cfg), range(len(sigmas) if count is None else count))
    if branches.uncond is None or not marks:
        return Trajectory(guided, cfg)
    return Trajectory(guided, cfg, path("g", branches.cond - branches.uncond, marks))


def load(
    store: Store,
    entry: Entry,
    targets: Sequence[float],
    extra: Iterable[str] = (),
    cfg: float | None = None,
) -> tuple[Trajectory, Mapping[str, Tensor]]:
    """The part of a record that answers for ``targets`` (sigmas) at a guidance scale (None: any),
    and further named tensors.

    Raises RecordError when the record is corrupt, and ValueError when its parts do not fit.
    """
    meta, extra = entry.meta, list(extra)
    count = needed(meta["sigmas"], targets)
    marks = [] if cfg == meta["cfg"] else needed_marks(entry, count)
    names = ["first", *extra]
    for kind, places in (("d", range(count)), ("g", marks)):
        names += [f"{kind}.{i}" for i in places[1:]]
    tensors = store.read(entry.id, names)
    if list(tensors["first"].shape[1:]) != meta["shape"][1:]:
        raise ValueError(f"the derivatives of record {entry.id} have not the shape it claims")
    made = trajectory(tensors, meta["sigmas"], meta["cfg"], marks, count)
    return made, {name: tensors[name] for name in extra}


def pictured(final: Tensor, colors: Callable[[Tensor], Tensor] | None) -> Tensor:
    """The preview of a final latent: in its own colours where the host knows them."""
    try:
        if colors is not None:
            return make_preview(colors(final), torch.eye(3).tolist())
    except Exception as error:  # a picture is worth no record
        log.info("[Carnator] a preview has false colours (%s: %s)", type(error).__name__, error)
    return make_preview(final)


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
        "guidance": recorder.marks(),
        "rms": recorder.final_rms(),
        "seconds": seconds,
    }
    final = latent.detach().float().cpu().clone()

    def encoded() -> dict[str, Tensor]:
        shown = pictured(final, request.colors)
        return {**recorder.tensors(), "final": final, PREVIEW: shown}

    held = {**recorder.held(), "final": final}
    return Draft(request.partition, request.identity, meta, held, signature, encoded)
