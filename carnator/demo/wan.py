"""A plain-torch Wan video diffusion transformer that reads the host's own checkpoint format.

The architecture is that of Wan 2.1 (Wan Team, arXiv:2503.20314): 3D patches, rotary position
embedding over (frame, row, column), self-attention, cross-attention to the text tokens, and a
feed-forward layer, each modulated by the time embedding. Parameter names follow the published
checkpoints, so one file serves this class and ComfyUI's loader alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import attended

EPS = 1e-6
TIME_FEATURES = 256
TIMESTEPS = 1000.0  # the time embedding sees sigma * 1000, as flow models in the host do


@dataclass(frozen=True)
class WanConfig:
    """Sizes of a Wan transformer. ``dim`` must be a multiple of ``num_heads``."""

    dim: int = 128
    ffn_dim: int = 512
    num_heads: int = 4
    num_layers: int = 6
    text_dim: int = 64
    channels: int = 16
    patch: tuple[int, int, int] = (1, 2, 2)

    def host_config(self) -> dict:
        """The part of the config that the host cannot read off the tensor shapes."""
        return {"transformer": {"num_heads": self.num_heads, "text_dim": self.text_dim}}

    @classmethod
    def from_checkpoint(cls, state: dict[str, Tensor], metadata: dict[str, str]) -> WanConfig:
        """Sizes of a checkpoint: from the shapes of its tensors and its "config" metadata.

        Raises KeyError or ValueError when it is not one of this architecture.
        """
        sizes = json.loads(metadata["config"])["transformer"]
        patches = state["patch_embedding.weight"]
        layers = {int(k.split(".")[1]) for k in state if k.startswith("blocks.")}
        return cls(
            dim=patches.shape[0],
            ffn_dim=state["blocks.0.ffn.0.weight"].shape[0],
            num_heads=sizes["num_heads"],
            num_layers=len(layers),
            text_dim=sizes["text_dim"],
            channels=patches.shape[1],
            patch=(patches.shape[2], patches.shape[3], patches.shape[4]),
        )

    def as_dict(self) -> dict:
        return asdict(self)


def timestep_features(t: Tensor) -> Tensor:
    """Sinusoidal features [B, 256] of timesteps t [B] in 0..1000, cosines first."""
    half = TIME_FEATURES // 2
    frequency = torch.exp(-math.log(10000.0) / half * torch.arange(half, device=t.device))
    angle = t.float()[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def rotary_table(grid: tuple[int, int, int], head_dim: int) -> Tensor:
    """Cosines and sines [2, N, head_dim / 2] for a token grid (frames, rows, columns).

    Each axis rotates its own share of the head: two sixths for rows and for columns, the rest
    for frames (RoFormer, arXiv:2104.09864, extended to three axes as in Wan).
    """
    side = 2 * (head_dim // 6)
    sizes = (head_dim - 2 * side, side, side)
    axes = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    angles = []
    for position, size in zip(axes, sizes, strict=True):
        exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles.append(position.reshape(-1, 1) * 10000.0**-exponent)
    angle = torch.cat(angles, dim=-1)
    return torch.stack([angle.cos(), angle.sin()]).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [B, N, H, D] by the angles of ``table`` [2, N, D / 2]."""
    cos, sin = table[:, :, None, :]
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class Attention(nn.Module):
    """Self- or cross-attention with RMS-normalised queries and keys."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(dim, eps=EPS), nn.RMSNorm(dim, eps=EPS)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        table: Tensor | None,
        observe: Callable[..., object] | None = None,
    ) -> Tensor:
        q = self.norm_q(self.q(x)).unflatten(-1, (self.heads, -1))
        k = self.norm_k(self.k(context)).unflatten(-1, (self.heads, -1))
        v = self.v(context).unflatten(-1, (self.heads, -1))
        if table is not None:
            q, k = rotate(q, table), rotate(k, table)
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        return self.o(attended(q, k, v, observe))


class Block(nn.Module):
    """One transformer block: modulated self-attention, cross-attention, modulated feed-forward."""

    def __init__(self, c: WanConfig):
        super().__init__()
        self.self_attn = Attention(c.dim, c.num_heads)
        self.cross_attn = Attention(c.dim, c.num_heads)
        self.norm3 = nn.LayerNorm(c.dim, eps=EPS)
        self.ffn = nn.Sequential(
            nn.Linear(c.dim, c.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(c.ffn_dim, c.dim)
        )
        self.modulation = nn.Parameter(torch.zeros(1, 6, c.dim))

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        text: Tensor,
        table: Tensor,
        observe: Callable[..., object] | None = None,
    ) -> Tensor:
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (time + self.modulation).chunk(6, 1)
        h = modulated_norm(x, shift_a, scale_a)
        x = x + self.self_attn(h, h, table, observe) * gate_a
        x = x + self.cross_attn(self.norm3(x), text, None)
        return x + self.ffn(modulated_norm(x, shift_f, scale_f)) * gate_f


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=EPS), 1 + scale)


class Head(nn.Module):
    """Final modulated projection back to patches."""

    def __init__(self, c: WanConfig):
        super().__init__()
        self.head = nn.Linear(c.dim, c.channels * math.prod(c.patch))
        self.modulation = nn.Parameter(torch.zeros(1, 2, c.dim))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (time[:, None] + self.modulation).chunk(2, 1)
        return self.head(modulated_norm(x, shift, scale))


class WanTransformer(nn.Module):
    """Predicts the flow velocity ``noise - clean`` of a video latent."""

    def __init__(self, config: WanConfig):
        super().__init__()
        c = self.config = config
        self.patch_embedding = nn.Conv3d(c.channels, c.dim, c.patch, c.patch)
        self.text_embedding = nn.Sequential(
            nn.Linear(c.text_dim, c.dim), nn.GELU(approximate="tanh"), nn.Linear(c.dim, c.dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(TIME_FEATURES, c.dim), nn.SiLU(), nn.Linear(c.dim, c.dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(c.dim, 6 * c.dim))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.head = Head(c)
        self._tables: dict[tuple[int, int, int], Tensor] = {}

    def table(self, grid: tuple[int, int, int]) -> Tensor:
        if grid not in self._tables:
            self._tables[grid] = rotary_table(grid, self.config.dim // self.config.num_heads)
        return self._tables[grid].to(self.patch_embedding.weight.device)

    def initialise(self, seed: int) -> None:
        """Weights to train from: the first output is zero, so the loss starts at the target's
        variance."""
        torch.manual_seed(seed)
        for name, p in self.named_parameters():
            if "modulation" in name:
                nn.init.normal_(p, std=0.02)
            elif p.ndim >= 2:
                nn.init.xavier_uniform_(p.view(p.shape[0], -1))
            elif "norm" not in name or name.endswith("bias"):
                nn.init.zeros_(p)
        nn.init.zeros_(self.head.head.weight)

    def matrices(self) -> list[nn.Parameter]:
        """The weight matrices of the blocks."""
        return [p for p in self.blocks.parameters() if p.ndim == 2]

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
        c = self.config
        h = self.patch_embedding(x)
        grid = tuple(h.shape[2:])
        h = h.flatten(2).transpose(1, 2)
        time = self.time_embedding(timestep_features(sigma * TIMESTEPS))
        time6 = self.time_projection(time).unflatten(1, (6, -1))
        text = self.text_embedding(text)
        table = self.table(grid)
        for i, block in enumerate(self.blocks):
            see = None if observe is None else partial(observe, i)
            h = block(h, time6, text, table, see)
        h = self.head(h, time)
        f, r, w = c.patch
        h = h.unflatten(1, grid).unflatten(-1, (f, r, w, c.channels))
        h = h.permute(0, 7, 1, 4, 2, 5, 3, 6)  # B C F f H r W w
        return h.flatten(6, 7).flatten(4, 5).flatten(2, 3)
