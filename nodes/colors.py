"""What a latent looks like without its decoder: the host's own linear guess at its colours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..carnator.demo import families
from .weights import model_path


def colors_of(patcher: Any) -> Callable[[Tensor], Tensor] | None:
    """What takes a latent [1, C, F, H, W] or [1, C, H, W], as a sampler node hands it on, to
    colours [1, 3, ...] in -1..1; None where the host has no guess. It keeps no model alive."""
    form, path = patcher.get_model_object("latent_format"), model_path(patcher)
    for family in families.FAMILIES.values():
        if path and Path(path).resolve() == family.path.resolve():
            return lambda latent: family.to_clip(form.process_in(latent.float()))
    factors = getattr(form, "latent_rgb_factors", None)
    if factors is None or getattr(form, "latent_rgb_factors_reshape", None) is not None:
        return None
    mix = torch.tensor(factors, dtype=torch.float32)
    bias = torch.tensor(getattr(form, "latent_rgb_factors_bias", None) or [0.0] * 3)

    def colors(latent: Tensor) -> Tensor:
        return (form.process_in(latent.float()).movedim(1, -1) @ mix + bias).movedim(-1, 1)

    return colors
