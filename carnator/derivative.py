"""The derivative an ODE sampler integrates, and its algebra.

``d(sigma) = (x - denoised) / sigma`` is dx/dsigma of the probability-flow ODE in the k-diffusion
form (Karras et al., arXiv:2206.00364, eq. 1 and algorithm 1). It holds alike for flow matching,
where ``d = velocity = noise - clean``, and for noise- and v-prediction, where ``d`` is the noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def derivative(x: Tensor, denoised: Tensor, sigma: float) -> Tensor:
    """d = (x - denoised) / sigma for latents of any equal shape; ``sigma`` > 0."""
    return (x - denoised) / sigma


def denoised_from(x: Tensor, d: Tensor, sigma: float) -> Tensor:
    """denoised = x - sigma * d, in x's dtype and on x's device."""
    return torch.add(x, d.to(device=x.device, dtype=x.dtype), alpha=-sigma)


def mean_square(a: Tensor) -> float:
    """Mean of squares of all elements, accumulated in float32."""
    return float(a.float().square().mean())


def relative_deviation(target: Tensor, donor: Tensor) -> float:
    """D = |d_t - d_s|^2 / |d_s|^2, the relative squared distance of two derivatives.

    Infinite when the donor's derivative is zero or anything is not finite.
    """
    norm = mean_square(donor)
    value = mean_square(target.float() - donor.float()) / norm if norm > 0 else float("inf")
    return value if value < float("inf") else float("inf")


@dataclass(frozen=True)
class Branches:
    """The derivatives of one evaluation, the two branches of classifier-free guidance apart.

    ``uncond`` is None when the run was not guided, or when its guidance could not be taken
    apart; then ``cond`` is the whole derivative.
    """

    cond: Tensor
    uncond: Tensor | None = None

    def at(self, cfg: float) -> Tensor:
        """The guided derivative at a guidance scale (Ho and Salimans, arXiv:2207.12598)."""
        if self.uncond is None:
            return self.cond
        if cfg == 1.0:
            return self.cond
        return torch.lerp(self.uncond, self.cond, cfg)
