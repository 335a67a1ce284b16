"""The embedded backbones: which there are, and what of the demo depends on which one it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import clips
from .hunyuan import HunyuanConfig, HunyuanTransformer, pooled_text
from .ltx import FRAME_RATE, LTXConfig, LTXTransformer
from .recipe import Recipe
from .wan import WanConfig, WanTransformer

MODELS = Path(__file__).parent / "models"


def pooled(text: Tensor) -> dict[str, Any]:
    return {"pooled_output": pooled_text(text)}


def masked(text: Tensor) -> dict[str, Any]:
    """All tokens count, and the frame rate is that of the rotary embedding in training."""
    return {
        "attention_mask": torch.ones(text.shape[:2], dtype=torch.long),
        "frame_rate": FRAME_RATE,
    }


@dataclass(frozen=True)
class Family:
    """One architecture in its tiny, bundled size.

    ``network`` and ``config`` are its classes. ``channels`` is the channel count of its latents
    in the host, ``fold`` how many frames, rows and columns of pixels become channels of one
    place in a latent. ``marker`` is a tensor that its checkpoints alone have. ``extras`` gives
    what the host wants beside text tokens [B, L, D], by the names it has for them.
    """

    name: str
    title: str
    network: Any
    config: Any
    marker: str
    channels: int = 16
    fold: clips.Fold = clips.FOLD
    extras: Callable[[Tensor], dict[str, Any]] | None = None
    recipe: Recipe = field(default_factory=Recipe)

    @property
    def path(self) -> Path:
        """Where the bundled weights are."""
        return MODELS / f"{self.name}_tiny.safetensors"

    @property
    def live_channels(self) -> int:
        """The leading channels that hold pixels; the others are zero."""
        return clips.live_channels(self.fold)

    @cached_property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape [1, C, F, H, W] of the latent of one clip."""
        return self.latent_shape(clips.FRAMES)

    def latent_shape(self, frames: int) -> tuple[int, int, int, int, int]:
        """Shape [1, C, F, H, W] of the latent of a clip of so many frames.

        Raises ValueError when they do not fold.
        """
        t, a, b = self.fold
        if frames < 1 or frames % t:
            raise ValueError(
                f"A clip of {frames} frames does not fit {self.title}: use a multiple of {t}."
            )
        return 1, self.channels, frames // t, clips.SIZE // a, clips.SIZE // b

    def conditioning(self, text: Tensor) -> dict[str, Any]:
        """What the host wants beside text tokens [B, L, D]; it may be nothing."""
        return {} if self.extras is None else self.extras(text)

    def to_latent(self, clip: Tensor) -> Tensor:
        """Fold clips [..., 3, F, H, W] in [-1, 1] into latents [..., C, f, h, w]."""
        return clips.to_latent(clip, self.fold, self.channels)

    def to_clip(self, latent: Tensor) -> Tensor:
        """Unfold latents [..., C, f, h, w] into clips [..., 3, F, H, W], clamped to [-1, 1]."""
        return clips.to_clip(latent, self.fold)


WAN = Family(
    "wan",
    "Wan",
    WanTransformer,
    WanConfig,
    marker="patch_embedding.weight",
    recipe=Recipe(steps=6_800, restarts=(5_600,)),
)
HUNYUAN = Family(
    "hunyuan",
    "HunyuanVideo",
    HunyuanTransformer,
    HunyuanConfig,
    marker="txt_in.input_embedder.weight",
    extras=pooled,
)
LTX = Family(
    "ltx",
    "LTX-Video",
    LTXTransformer,
    LTXConfig,
    marker="patchify_proj.weight",
    channels=128,
    fold=(2, 4, 4),
    extras=masked,
)

FAMILIES: dict[str, Family] = {family.name: family for family in (WAN, HUNYUAN, LTX)}


def named(name: str) -> Family:
    """The family called ``name``. Raises ValueError that lists those there are."""
    if name not in FAMILIES:
        raise ValueError(f"Unknown backbone {name!r}: use one of {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def of_checkpoint(tensors: Iterable[str]) -> Family:
    """The family of a checkpoint with these tensor names. Raises ValueError for a foreign one."""
    names = set(tensors)
    for family in FAMILIES.values():
        if family.marker in names:
            return family
    titles = ", ".join(family.title for family in FAMILIES.values())
    raise ValueError(f"none of its tensors belong to a backbone known here ({titles})")


def of_config(config: object) -> Family:
    """The family whose config ``config`` is. Raises ValueError when there is none."""
    for family in FAMILIES.values():
        if isinstance(config, family.config):
            return family
    raise ValueError(f"{type(config).__name__} is not the config of a backbone known here.")


def of_network(network: object) -> Family:
    """The family whose class ``network`` is. Raises ValueError when there is none."""
    for family in FAMILIES.values():
        if isinstance(network, family.network):
            return family
    raise ValueError(f"{type(network).__name__} is not the network of a backbone known here.")
