"""Loads a tiny checkpoint and answers for both branches of classifier-free guidance."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..backbones import TokenLayout, architecture, layout_of
from . import families
from .attend import Watched
from .families import WAN

BUNDLED = WAN.path
LORA_RANK = 4


class EmbeddedModel:
    """A loaded backbone. ``calls`` counts forward passes; ``name`` is shown to people."""

    def __init__(self, network: nn.Module, name: str):
        self.family = families.of_network(network)
        self.network: Any = network.eval().requires_grad_(False)
        self.name = name
        self.calls = 0
        self.fingerprint = fingerprint(network)
        self.architecture = architecture((k, v.shape) for k, v in network.state_dict().items())

    @property
    def config(self) -> Any:
        """The sizes of the network, of its family's config class."""
        return self.network.config

    def token_layout(self) -> TokenLayout | None:
        """How the network lays out its tokens, read off its shapes as in ComfyUI."""
        shapes = {k: tuple(v.shape) for k, v in self.network.state_dict().items()}
        return layout_of(shapes, getattr(self.config, "num_heads", None))

    @classmethod
    def load(cls, path: Path | str = BUNDLED) -> EmbeddedModel:
        """Read a checkpoint that ``train.save_model`` wrote.

        Raises FileNotFoundError or ValueError, each saying what to do.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no model at {path}: give the path of a checkpoint, or make one with "
                "'python -m carnator demo train'."
            )
        try:
            with safe_open(path, "pt") as file:
                state = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
            family = families.of_checkpoint(state)
            network = family.network(family.config.from_checkpoint(state, metadata))
            network.load_state_dict(state)
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{path} is not a checkpoint of a demo backbone ({reason}): give one that "
                "'python -m carnator demo train' wrote."
            ) from error
        return cls(network, path.stem)

    def branches(
        self,
        x: Tensor,
        sigma: float,
        cond: Tensor,
        uncond: Tensor | None = None,
        observe: Callable[[Tensor], object] | None = None,
        override: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Denoised latents of the cond and the uncond branch, one forward pass for both.

        x is [B, C, F, H, W], cond [B, L, D] and uncond [B or 1, L, D] or None. ``observe`` is
        called with every self-attention's output [2 B or B, N, C], the cond branch first;
        ``override`` may compute self-attention (``attend.Watched``).
        """
        self.calls += 1
        if uncond is None:
            inputs, text = x, cond
        else:
            inputs = torch.cat([x, x])
            text = torch.cat([cond, uncond.expand_as(cond)])
        see = None
        if observe is not None or override is not None:
            see = Watched(observe, override, {"cond_or_uncond": [0, 1][: len(inputs) // len(x)]})
        velocity = self.network(inputs, x.new_full((len(inputs),), sigma), text, see)
        denoised = inputs - velocity * sigma
        if uncond is None:
            return denoised, None
        return denoised[: len(x)], denoised[len(x) :]


def fingerprint(network: nn.Module) -> str:
    """A hash of all weights: it changes with a LoRA or any other patch."""
    h = hashlib.blake2b(digest_size=16)
    for name, value in sorted(network.state_dict().items()):
        h.update(name.encode())
        h.update(value.detach().contiguous().numpy().tobytes())
    return h.hexdigest()


def with_lora(model: EmbeddedModel, strength: float = 0.05, seed: int = 0) -> EmbeddedModel:
    """A copy whose block matrices W became W + A B, as a LoRA of rank 4 would make them.

    A and B are random (seeded); A B is scaled to ``strength`` times the norm of W.
    """
    network = model.family.network(model.config)
    state = {k: v.clone() for k, v in model.network.state_dict().items()}
    patched = {id(p) for p in model.network.matrices()}
    patched_names = {k for k, p in model.network.named_parameters() if id(p) in patched}
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(state):
        w = state[name]
        if name in patched_names:
            a = torch.randn(w.shape[0], LORA_RANK, generator=generator)
            b = torch.randn(LORA_RANK, w.shape[1], generator=generator)
            change = a @ b
            w += change * (strength * w.norm() / change.norm())
    network.load_state_dict(state)
    return EmbeddedModel(network, f"{model.name} + lora {strength:.0%}")
