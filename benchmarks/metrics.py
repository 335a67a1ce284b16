"""What a run is worth: its distance from the target's own dense run, and what its clip shows.

Distances are PSNR of the latent and of the clip, and SSIM of the clip. What a clip shows is read
off it exactly (``carnator.demo.quality``): the share of the target's attributes that are right, and
leakage, the share of attributes that only the donor's prompt names and that are there all the same.
Dense runs have both too, and are what a method's are to be compared with: a model that now and
then paints a wrong background does so without any donor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from carnator.demo import quality
from carnator.demo.captions import Caption
from carnator.demo.model import EmbeddedModel

from .batch import Pair, latent_peak, psnr_each

CAP_DB = 59.0  # where a clip rounded to 8 bits lies; beyond it nearness is not worth anything
WINDOW, SIGMA = 11, 1.5  # Wang et al. 2004
K1, K2 = 0.01, 0.03


@dataclass(frozen=True)
class Quality:
    """One run. ``psnr_db`` is the latent's, ``clip_db`` the clip's, both at most 59 dB; ``ssim``
    at most 1; ``attributes`` in 0..1; ``leakage`` in 0..1, or None where only the target's
    prompt names anything."""

    psnr_db: float
    clip_db: float
    ssim: float
    attributes: float
    leakage: float | None


def judge(
    model: EmbeddedModel, latents: Tensor, reference: Tensor, pairs: Sequence[Pair]
) -> list[Quality]:
    """Each latent [B, C, ...] of the pairs' targets against its dense run's."""
    clips, dense = model.family.to_clip(latents), model.family.to_clip(reference)
    dbs = psnr_each(latents, reference, latent_peak(model))
    likeness = ssim(clips, dense)
    return [
        Quality(
            min(dbs[i], CAP_DB),
            min(quality.psnr(clips[i], dense[i]), CAP_DB),
            likeness[i],
            quality.attributes_right(clips[i], pair.target),
            leakage(clips[i], pair.donor, pair.target),
        )
        for i, pair in enumerate(pairs)
    ]


def gaussian(size: int = WINDOW, sigma: float = SIGMA) -> Tensor:
    """Weights [size] of one side of a Gaussian window; their sum is 1."""
    x = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    line = (-x.square() / (2 * sigma**2)).exp()
    return line / line.sum()


def ssim(clips: Tensor, reference: Tensor, peak: float = 2.0) -> list[float]:
    """Mean SSIM of each clip [B, 3, F, H, W], over frames and colours, where the whole window
    fits; ``peak`` is the range of the values.

    Z. Wang, A. C. Bovik, H. R. Sheikh, E. P. Simoncelli, "Image Quality Assessment: From Error
    Visibility to Structural Similarity", IEEE Trans. Image Processing 13(4), 2004, eq. 13, with
    their window (11 x 11, sigma 1.5) and constants (0.01, 0.03).
    """
    if min(clips.shape[-2:]) < WINDOW:
        raise ValueError(f"Frames of {tuple(clips.shape[-2:])} are smaller than SSIM's window.")
    c1, c2 = (K1 * peak) ** 2, (K2 * peak) ** 2
    line = gaussian()

    def local(values: Tensor) -> Tensor:
        rows = F.conv2d(values.flatten(0, 2)[:, None], line.view(1, 1, 1, -1))
        return F.conv2d(rows, line.view(1, 1, -1, 1))

    a, b = clips.double(), reference.double()
    mean_a, mean_b = local(a), local(b)
    var_a, var_b = local(a * a) - mean_a**2, local(b * b) - mean_b**2
    shared = local(a * b) - mean_a * mean_b
    top = (2 * mean_a * mean_b + c1) * (2 * shared + c2)
    bottom = (mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)
    return (top / bottom).view(len(clips), -1).mean(1).tolist()


def facts(caption: Caption) -> dict[str, tuple[str, ...]]:
    """What a caption says of its clip, under the names ``quality.check`` uses."""
    out: dict[str, tuple[str, ...]] = {"background": ("background", caption.background)}
    for i, thing in enumerate(caption.things):
        out[f"color {i}"] = ("color", thing.color)
        out[f"shape {i}"] = ("shape", thing.color, thing.shape)
        out[f"motion {i}"] = ("motion", thing.color, thing.motion)
    return out


def leakage(clip: Tensor, donor: Caption, target: Caption) -> float | None:
    """Share of what only the donor's caption says that a clip [3, F, H, W] shows, in 0..1.

    A shape and a motion are those of a thing of a colour: turning a red circle into a red square
    leaves one attribute to leak, turning it blue three (a red thing, which is round, and moves).
    """
    wanted = set(facts(target).values())
    alien = [name for name, fact in facts(donor).items() if fact not in wanted]
    if not alien:
        return None
    shown = quality.check(clip, donor)
    return sum(shown[name] for name in alien) / len(alien)
