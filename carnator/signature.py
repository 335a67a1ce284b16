"""The Early Signature: what the first evaluation of a run says about where it is heading.

About 400 numbers, pooled from the denoised estimate (near sigma 1 it is close to E[x0 | prompt],
so it shows the layout), the guidance direction ``cond - uncond``, and the self-attention outputs
at a sixth, a third and half of the depth. It shortlists donors; the exact D0 then decides.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LAYOUT_GRID = (2, 3, 3)
GUIDANCE_GRID = (1, 2, 2)
DEPTHS = (1 / 6, 1 / 3, 1 / 2)
ATTENTION_FEATURES = 16
SHORTLIST = 4


def pooled(latent: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Channel means over a coarse grid of a latent [1, C, F, H, W] (or [1, C, H, W]), as a flat
    vector; a grid finer than the latent is cut to it."""
    if latent.ndim == 4:
        latent = latent[:, :, None]
    frames, rows, columns = (min(g, n) for g, n in zip(grid, latent.shape[2:], strict=True))
    return F.adaptive_avg_pool3d(latent.float(), (frames, rows, columns)).flatten()


class AttentionProbe:
    """Keeps one pooled vector per self-attention call while the probe's evaluation runs."""

    def __init__(self) -> None:
        self._outputs: list[Tensor] = []

    def see(self, out: Tensor) -> None:
        """Take an attention output [B, N, C]."""
        mean = out.detach().float().mean((0, 1))
        self._outputs.append(F.adaptive_avg_pool1d(mean[None], ATTENTION_FEATURES)[0])

    def vector(self) -> Tensor:
        if not self._outputs:  # not to be watched, as where the model is compiled
            return torch.zeros(len(DEPTHS) * ATTENTION_FEATURES)
        last = len(self._outputs) - 1
        return torch.cat([self._outputs[min(last, round(d * last))].cpu() for d in DEPTHS])


def signature(
    denoised: Tensor,
    cond: Tensor | None,
    uncond: Tensor | None,
    attention: AttentionProbe | None = None,
) -> np.ndarray:
    """Early Signature, float16 [K], of one evaluation with latents [1, C, F, H, W]."""
    parts = [pooled(denoised, LAYOUT_GRID).cpu()]
    if cond is not None and uncond is not None:
        guidance = cond - uncond
        parts.append(pooled(guidance, GUIDANCE_GRID).cpu())
        parts.append(guidance.float().square().mean().sqrt().cpu()[None])
    parts.append(denoised.float().square().mean().sqrt().cpu()[None])
    if attention is not None:
        parts.append(attention.vector())
    vector = torch.cat(parts).clamp(-6e4, 6e4)
    return vector.detach().numpy().astype(np.float16)
