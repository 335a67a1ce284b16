"""Maps over latent frames as images a person can look at."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SIDE = 256  # pixels, about; small maps are enlarged so that their cells stay visible
COLD, HOT = (0.05, 0.05, 0.15), (1.0, 0.85, 0.2)


def heat_map(values: Tensor | np.ndarray) -> Tensor:
    """Images [F, H, W, 3] in 0..1 of maps [F, h, w] in 0..1: dark is 0, bright is 1."""
    field = torch.as_tensor(np.asarray(values, dtype=np.float32)).clamp(0, 1)
    cold, hot = torch.tensor(COLD), torch.tensor(HOT)
    image = cold + field[..., None] * (hot - cold)
    return enlarge(image, max(1, SIDE // max(field.shape[-2:])))


def plain_map(value: float) -> Tensor:
    """A map [1, H, W, 3] of one value in 0..1, for runs that have none of their own: without an
    image the editor would go on showing that of the run before."""
    return heat_map(torch.full((1, 8, 8), float(value)))


def enlarge(images: Tensor, factor: int) -> Tensor:
    """Images [F, H, W, C] with every pixel repeated ``factor`` times in both directions."""
    return images.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
