"""A plain-torch LTX-Video transformer that reads the host's own checkpoint format.

The architecture is that of LTX-Video 0.9 (HaCohen et al., arXiv:2501.00103): one token for each
latent position, rotary position embedding on coordinates in seconds and pixels, and blocks of
self-attention, cross-attention to the text tokens and a feed-forward layer, modulated by one
time embedding that all blocks share (PixArt-alpha, arXiv:2310.00426). Parameter names follow the
published checkpoints, so one file serves this class and ComfyUI's loader alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import attended
from .wan import TIME_FEATURES, TIMESTEPS, modulated_norm, rotate, timestep_features

EPS = 1e-6
EPS_HEADS = 1e-5  # of the normalised queries and keys
FRAME_RATE = 25.0  # what the host assumes of a prompt that names no frame rate
THETA = 10000.0
MAX_POSITION = (20.0, 2048.0, 2048.0)  # seconds, pixels, pixels: where the angles have turned once
CHECKPOINT_ONLY = {  # options of later checkpoints, and the only value this class computes
    "causal_temporal_positioning": False,
    "use_middle_indices_grid": False,
    "rope_type": "interleaved",
    "frequencies_precision": "float32",
    "positional_embedding_theta": THETA,
    "positional_embedding_max_pos": list(MAX_POSITION),
    "timestep_scale_multiplier": TIMESTEPS,
    "cross_attention_adaln": False,
    "caption_proj_before_connector": False,
}


@dataclass(frozen=True)
class LTXConfig:
    """Sizes of an LTX-Video transformer. ``dim`` must be a multiple of ``num_heads``.

    ``scale`` says how many frames, rows and columns of pixels one latent position covers.
    """

    dim: int = 192
    num_heads: int = 6
    num_layers: int = 4
    text_dim: int = 64
    channels: int = 128
    scale: tuple[int, int, int] = (8, 32, 32)

    def host_config(self) -> dict:
        """The config the host builds its model from; shapes alone tell it only the layers."""
        return {
            "transformer": {
                "in_channels": self.channels,
                "num_attention_heads": self.num_heads,
                "attention_head_dim": self.dim // self.num_heads,
                "cross_attention_dim": self.dim,
                "caption_channels": self.text_dim,
                "vae_scale_factors": list(self.scale),
            }
        }

    @classmethod
    def from_checkpoint(cls, state: dict[str, Tensor], metadata: dict[str, str]) -> LTXConfig:
        """Sizes of a checkpoint: from the shapes of its tensors and its "config" metadata.

        Raises KeyError for the checkpoint of another family, and ValueError for one of LTX-Video
        with an option that this class does not compute.
        """
        dim, channels = state["patchify_proj.weight"].shape
        text_dim = state["caption_projection.linear_1.weight"].shape[1]
        options = json.loads(metadata["config"])["transformer"]
        for name, value in CHECKPOINT_ONLY.items():
            if options.get(name, value) != value:
                raise ValueError(
                    f"the LTX-Video checkpoint has {name} = {options[name]!r}, and only {value!r} "
                    "is supported"
                )
        frames, rows, columns = options.get("vae_scale_factors", cls.scale)
        layers = {k.split(".")[1] for k in state if k.startswith("transformer_blocks.")}
        return cls(
            dim=dim,
            num_heads=options["num_attention_heads"],
            num_layers=len(layers),
            text_dim=text_dim,
            channels=channels,
            scale=(frames, rows, columns),
        )


def rotary_table(grid: tuple[int, int, int], scale: tuple[int, int, int], dim: int) -> Tensor:
    """Cosines and sines [2, N, dim / 2] for a token grid (frames, rows, columns).

    A position is the corner of its token in seconds and pixels, as a fraction of MAX_POSITION
    mapped to -1..1. The frequencies run from pi / 2 to THETA pi / 2 over all heads together, the
    three axes taking turns; pairs left over do not turn. In float32 throughout, as in the host:
    at the highest frequencies the rounding of an angle is visible in its cosine.
    """
    count = dim // 6
    frequency = THETA ** torch.linspace(0, 1, count) * (math.pi / 2)
    ranges = (torch.arange(n) * step for n, step in zip(grid, scale, strict=True))
    position = torch.stack(torch.meshgrid(*ranges, indexing="ij"), dim=-1).flatten(0, 2).float()
    position = position * torch.tensor((1 / FRAME_RATE, 1.0, 1.0)) / torch.tensor(MAX_POSITION)
    angle = (frequency[:, None] * (position * 2 - 1)[:, None]).flatten(1)
    angle = F.pad(angle, (dim // 2 - 3 * count, 0))
    return torch.stack([angle.cos(), angle.sin()])


class Attention(nn.Module):
    """Self- or cross-attention with RMS-normalised queries and keys."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(dim, dim))
        self.q_norm, self.k_norm = (nn.RMSNorm(dim, eps=EPS_HEADS) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        table: Tensor | None,
        observe: Callable[..., object] | None = None,
    ) -> Tensor:
        q, k, v = self.q_norm(self.to_q(x)), self.k_norm(self.to_k(context)), self.to_v(context)
        if table is not None:  # the angles differ from head to head: turn before the split
            q, k = (rotate(a[:, :, None], table).flatten(2) for a in (q, k))
        q, k, v = (a.unflatten(-1, (self.heads, -1)).transpose(1, 2) for a in (q, k, v))
        return self.to_out(attended(q, k, v, observe))


class GELUProjection(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.proj = nn.Linear(dim, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """Two layers, the inner one four times as wide."""

    def __init__(self, dim: int):
        super().__init__()
        # The empty place is the dropout of the published layout.
        self.net = nn.Sequential(
            GELUProjection(dim, 4 * dim), nn.Identity(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Block(nn.Module):
    """One transformer block: modulated self-attention, cross-attention, modulated feed-forward."""

    def __init__(self, c: LTXConfig):
        super().__init__()
        self.attn1 = Attention(c.dim, c.num_heads)
        self.attn2 = Attention(c.dim, c.num_heads)
        self.ff = FeedForward(c.dim)
        self.scale_shift_table = nn.Parameter(torch.zeros(6, c.dim))

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        text: Tensor,
        table: Tensor,
        observe: Callable[..., object] | None = None,
    ) -> Tensor:
        modulation = time + self.scale_shift_table
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = modulation.chunk(6, 1)
        h = modulated_rms(x, shift_a, scale_a)
        x = x + self.attn1(h, h, table, observe) * gate_a
        x = x + self.attn2(x, text, None)
        return x + self.ff(modulated_rms(x, shift_f, scale_f)) * gate_f


def modulated_rms(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, F.rms_norm(x, x.shape[-1:], eps=EPS), 1 + scale)


class TwoLayers(nn.Module):
    """Two linear layers with an activation between them, under their published names."""

    def __init__(self, size: int, dim: int, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(size, dim), nn.Linear(dim, dim)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.activation(self.linear_1(x)))


class TimeModulation(nn.Module):
    """The time embedding [B, dim] and what it adds to every block's modulation [B, 6, dim]."""

    def __init__(self, dim: int):
        super().__init__()
        self.emb = nn.ModuleDict({"timestep_embedder": TwoLayers(TIME_FEATURES, dim, F.silu)})
        self.linear = nn.Linear(dim, 6 * dim)

    def forward(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        time = self.emb["timestep_embedder"](timestep_features(sigma * TIMESTEPS))
        return time, self.linear(F.silu(time)).unflatten(1, (6, -1))


class LTXTransformer(nn.Module):
    """Predicts the flow velocity ``noise - clean`` of a video latent."""

    def __init__(self, config: LTXConfig):
        super().__init__()
        c = self.config = config
        self.patchify_proj = nn.Linear(c.channels, c.dim)
        self.adaln_single = TimeModulation(c.dim)
        self.caption_projection = TwoLayers(c.text_dim, c.dim, partial(F.gelu, approximate="tanh"))
        self.transformer_blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.scale_shift_table = nn.Parameter(torch.zeros(2, c.dim))
        self.proj_out = nn.Linear(c.dim, c.channels)
        self._tables: dict[tuple[int, int, int], Tensor] = {}

    def initialise(self, seed: int) -> None:
        """Draw the weights a training run starts from; the first prediction is zero."""
        torch.manual_seed(seed)
        for name, p in self.named_parameters():
            if name.endswith("scale_shift_table"):
                nn.init.normal_(p, std=0.02)
            elif p.ndim == 2:
                nn.init.xavier_uniform_(p)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
            else:
                nn.init.ones_(p)
        nn.init.zeros_(self.proj_out.weight)

    def matrices(self) -> list[nn.Parameter]:
        """The weight matrices of the blocks, without the modulation tables."""
        named = self.transformer_blocks.named_parameters()
        return [p for name, p in named if p.ndim == 2 and name.endswith("weight")]

    def table(self, grid: tuple[int, int, int]) -> Tensor:
        if grid not in self._tables:
            self._tables[grid] = rotary_table(grid, self.config.scale, self.config.dim)
        return self._tables[grid].to(self.proj_out.weight.device)

    def forward(
        self,
        x: Tensor,
        sigma: Tensor,
        text: Tensor,
        observe: Callable[..., object] | None = None,
    ) -> Tensor:
        """Velocity of latents x [B, C, F, H, W] at noise levels sigma [B] in 0..1.

        ``text`` is [B, L, text_dim]. ``observe(layer, q, k, v, out)`` is called for every
        self-attention with q, k, v [B, H, N, D] and its output [B, N, C].
        """
        frames, rows, columns = x.shape[2:]
        grid = (frames, rows, columns)
        h = self.patchify_proj(x.flatten(2).transpose(1, 2))
        time, time6 = self.adaln_single(sigma)
        text = self.caption_projection(text)
        table = self.table(grid)
        for i, block in enumerate(self.transformer_blocks):
            see = None if observe is None else partial(observe, i)
            h = block(h, time6, text, table, see)
        shift, scale = (time[:, None] + self.scale_shift_table).chunk(2, 1)
        h = self.proj_out(modulated_norm(h, shift, scale))
        return h.transpose(1, 2).unflatten(2, grid)
