"""A recorded run: the derivatives along its path, for any sigma it covers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .coding import Decoder

SAME_SIGMA = 1e-5  # relative difference below which two noise levels are one


def same_sigma(a: float, b: float) -> bool:
    return abs(a - b) <= SAME_SIGMA * max(abs(a), abs(b), 1e-6)


class Path:
    """Tensors [1, C, ...] along falling sigmas, linear in sigma between them.

    ``start`` is the first one, ``encoded`` what a ``coding.Encoder`` made of the others; or, not
    ``chained``, ``coding.encode_alone`` of each. Where two evaluations share a sigma (second-order
    samplers), the later one counts: it was made at the corrected latent.
    """

    def __init__(
        self,
        sigmas: Sequence[float],
        start: Tensor,
        encoded: Sequence[Tensor],
        chained: bool = True,
    ) -> None:
        self._sigmas, self._decoder = list(sigmas), Decoder(start, encoded, chained)
        self._nodes: list[tuple[float, int]] = []  # sigma, place in what was encoded
        for i, sigma in enumerate(sigmas):
            if self._nodes and same_sigma(self._nodes[-1][0], sigma):
                self._nodes.pop()
            self._nodes.append((sigma, i))

    def to(self, device: torch.device) -> Path:
        """The path with its tensors on a device."""
        decoder = self._decoder
        encoded = [data.to(device) for data in decoder.encoded]
        return Path(self._sigmas, decoder.start.to(device), encoded, decoder.chained)

    def at(self, sigma: float) -> Tensor:
        """The tensor at a sigma. Below the last node that node counts.

        Raises ValueError above the first node: the donor says nothing there.
        """
        for n, (s, i) in enumerate(self._nodes):
            if same_sigma(s, sigma):
                return self._decoder[i]
            if s < sigma:
                if n == 0:
                    raise ValueError(
                        f"The donor's schedule starts at sigma {s:.4f} and cannot answer for "
                        f"{sigma:.4f}."
                    )
                above, before = self._nodes[n - 1]
                weight = (above - sigma) / (above - s)
                return torch.lerp(self._decoder[before], self._decoder[i], weight)
        return self._decoder[self._nodes[-1][1]]


class Trajectory:
    """Answers for the donor's derivative at any sigma its schedule covers.

    Args:
        guided: the guided derivatives, as the donor's sampler met them.
        cfg: the guidance scale they were made at.
        guidance: cond - uncond at some of the sigmas, where guidance was taken apart; it changes
            slowly, and takes the guided derivative to another scale.
    """

    def __init__(self, guided: Path, cfg: float = 1.0, guidance: Path | None = None) -> None:
        self._guided, self._cfg, self._guidance = guided, cfg, guidance

    def to(self, device: torch.device) -> Trajectory:
        """The trajectory with its encoded tensors on a device."""
        guidance = None if self._guidance is None else self._guidance.to(device)
        return Trajectory(self._guided.to(device), self._cfg, guidance)

    def at(self, sigma: float, cfg: float) -> Tensor:
        """The donor's guided derivative [1, C, ...] (float32) at a sigma and a guidance scale,
        linear in sigma between recorded nodes. Below the last node that node counts.

        Raises ValueError above the first node: the donor says nothing there.
        """
        d = self._guided.at(sigma)
        if self._guidance is None or cfg == self._cfg:
            return d
        return torch.add(d, self._guidance.at(sigma), alpha=cfg - self._cfg)
