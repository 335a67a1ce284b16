"""What is known of a request before its first evaluation, and what its first evaluation adds."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .noise import POLICIES
from .risk import LOOSE, PRESETS


def digest(parts: Mapping[str, str]) -> str:
    """A stable 128-bit hex hash of named strings."""
    text = json.dumps(dict(parts), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def tensor_digest(*tensors: Tensor | None) -> str:
    """A hex hash of the values, shapes and dtypes of tensors, wherever they live."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is None:
            hasher.update(b"none")
            continue
        flat = tensor.detach().cpu().contiguous()
        hasher.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
        hasher.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _number(text: str) -> float:
    """The number a text spells, NaN if none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass(frozen=True)
class Settings:
    """What the user asks for.

    ``preset`` is one of ``faithful``, ``balanced``, ``fast``, or ``custom`` with ``budget_db``:
    the expected deviation from the dense run, as latent PSNR in dB, 10 to 80. ``sparse`` is
    ``off``, ``auto``, or a number: the largest share of pairs of blocks that a head of attention
    may look at without being computed densely. ``attention`` is a back end of
    ``attention.sparse_attention``. Raises ValueError.
    """

    preset: str = "balanced"
    budget_db: float | None = None
    noise_policy: str = "keep"
    reuse: bool = True
    record: bool = True
    exact_hits: bool = True
    sparse: str = "off"
    attention: str = "auto"

    def __post_init__(self) -> None:
        if self.preset not in (*PRESETS, "custom"):
            names = ", ".join((*PRESETS, "custom"))
            raise ValueError(f"Unknown preset {self.preset!r}: use one of {names}.")
        if self.noise_policy not in POLICIES:
            raise ValueError(
                f"Unknown noise policy {self.noise_policy!r}: use one of {', '.join(POLICIES)}."
            )
        if self.preset == "custom" and self.budget_db is None:
            raise ValueError("The preset 'custom' needs a budget_db: give a number from 10 to 80.")
        if self.budget_db is not None and not 10 <= self.budget_db <= 80:
            raise ValueError(
                f"The budget of {self.budget_db} dB is out of range: use 10 (loose) to 80 (strict)."
            )

        if self.sparse not in ("off", "auto") and not 0 < _number(self.sparse) <= 1:
            raise ValueError(
                f"Sparse attention cannot be {self.sparse!r}: use off, auto, or a density above 0 "
                "and at most 1."
            )

    @property
    def most_density(self) -> float:
        """The density above which a head of attention stays dense."""
        return 1.0 if self.sparse in ("off", "auto") else _number(self.sparse)

    @property
    def budget(self) -> float:
        """The budget in dB: the preset's, unless ``custom`` gives its own."""
        if self.preset == "custom" and self.budget_db is not None:
            return self.budget_db
        return PRESETS[self.preset]

    @property
    def loose(self) -> bool:
        """Whether most runs keeping the budget will do; else nearly all have to."""
        return self.preset in LOOSE


@dataclass(frozen=True)
class Request:
    """Everything known of a run before its first evaluation.

    ``hard`` keys must be equal in a donor, ``soft`` keys are judged by evidence; all equal means
    the same request. ``sigmas`` is the schedule with its final value. ``cfg`` is the guidance
    scale (1 = unguided). ``architecture`` (``backbones.architecture``) picks the risk table.
    """

    hard: Mapping[str, str]
    soft: Mapping[str, str]
    architecture: str
    sampler: str
    sigmas: tuple[float, ...]
    cfg: float
    seed: int
    labels: Mapping[str, str] = field(default_factory=dict)
    sampler_options: Mapping[str, Any] = field(default_factory=dict)
    # Final latent [1, C, ...] to colours [1, 3, ...] in -1..1, where the host knows them.
    colors: Callable[[Tensor], Tensor] | None = None

    @property
    def partition(self) -> str:
        return digest({**self.hard, "architecture": self.architecture})

    @property
    def identity(self) -> str:
        return digest({**self.hard, **self.soft, "seed": str(self.seed)})

    @property
    def twin(self) -> str:
        """Hash of the request without its seed and noise: equal twins ask for the same clip but
        for the seed."""
        hard = {k: v for k, v in self.hard.items() if k != "noise"}
        return digest({**hard, **self.soft})


@dataclass
class Evaluation:
    """One real model call: ``denoised`` exactly as the host returned it, and the denoised of the
    two guidance branches where they were observed (all [B, C, F, H, W])."""

    denoised: Tensor
    cond: Tensor | None = None
    uncond: Tensor | None = None


@dataclass(frozen=True)
class Later:
    """A further evaluation that a probe made: at latents x and a sigma, in ``seconds``."""

    x: Tensor
    sigma: float
    evaluation: Evaluation
    seconds: float = 0.0


@dataclass(frozen=True)
class Probe:
    """The first evaluation of a run, with its Early Signature. ``seconds`` is what it took;
    ``second`` is the evaluation after it, where that was made too."""

    request: Request
    x: Tensor
    sigma: float
    evaluation: Evaluation
    signature: np.ndarray
    seconds: float = 0.0
    second: Later | None = None

    def at(self, call: int) -> Probe | Later | None:
        """What the probe made of the sampler's ``call``-th evaluation, counted from 0."""
        return self if call == 0 else self.second if call == 1 else None
