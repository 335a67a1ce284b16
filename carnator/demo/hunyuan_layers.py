"""The layers of the HunyuanVideo transformer, named as in the checkpoints the host takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import attended
from .wan import EPS, TIME_FEATURES, modulated_norm

HEAD_DIM = 128  # the host takes the number of heads to be hidden / 128
AXES = (16, 56, 56)  # shares of a head that frame, row and column rotate
THETA = 256.0
MLP_RATIO = 4
REFINER_BLOCKS = 2

Observe = Callable[..., object]


@functools.cache
def rotary_table(text_tokens: int, grid: tuple[int, int, int]) -> Tensor:
    """Cosines and sines [2, L + N, 64] for the text tokens and a grid (frames, rows, columns).

    Text tokens stay unrotated (RoFormer, arXiv:2104.09864, extended to three axes).
    """
    # Cached, so it must be fit for training even where a run without gradients asks first.
    with torch.inference_mode(False), torch.no_grad():
        axes = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
        angles = []
        for position, size in zip(axes, AXES, strict=True):
            exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
            angles.append(position.reshape(-1, 1) * THETA**-exponent)
        angle = F.pad(torch.cat(angles, dim=-1), (0, 0, text_tokens, 0))
        return torch.stack([angle.cos(), angle.sin()]).float()


@torch.compiler.assume_constant_result
def constant_table(text_tokens: int, grid: tuple[int, int, int]) -> Tensor:
    """``rotary_table``, which compiled code takes as a constant instead of tracing its making."""
    return rotary_table(text_tokens, grid)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [B, H, N, D] by the angles of ``table`` [2, N, D / 2]."""
    cos, sin = table
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, H, N, D] out of [B, N, 3 H D]."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, observe: Observe | None) -> Tensor:
    """Joint attention [B, N, H D] of normalised q, k and of v [B, H, N, D]."""
    return attended(rotate(q, table), rotate(k, table), v, observe)


def feed_forward(hidden: int, activation: nn.Module) -> nn.Sequential:
    wide = hidden * MLP_RATIO
    return nn.Sequential(nn.Linear(hidden, wide), activation, nn.Linear(wide, hidden))


class Embedder(nn.Module):
    """Two layers that bring a vector to the hidden size."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.in_layer, self.out_layer = nn.Linear(width, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))


class Modulation(nn.Module):
    """Shifts, scales and gates [B, 1, C] from the activated conditioning vector [B, C]."""

    def __init__(self, hidden: int, count: int):
        super().__init__()
        self.lin = nn.Linear(hidden, count * hidden)

    def forward(self, vector: Tensor) -> tuple[Tensor, ...]:
        return self.lin(vector)[:, None].chunk(self.lin.out_features // vector.shape[-1], -1)


class HeadNorm(nn.Module):
    """RMS normalisation of the queries and keys of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.query_norm, self.key_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q), self.key_norm(k)


class Projections(nn.Module):
    """The projections into attention and out of it, of one kind of tokens."""

    def __init__(self, hidden: int, norm: bool = True):
        super().__init__()
        self.heads = hidden // HEAD_DIM
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        if norm:
            self.norm = HeadNorm()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split_heads(self.qkv(x), self.heads)
        return *self.norm(q, k), v


class RefinerBlock(nn.Module):
    """Gated self-attention and feed-forward among the text tokens."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, eps=EPS)
        self.self_attn = Projections(hidden, norm=False)
        self.norm2 = nn.LayerNorm(hidden, eps=EPS)
        self.mlp = feed_forward(hidden, nn.SiLU())
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        gate_a, gate_f = self.adaLN_modulation(vector)[:, None].chunk(2, -1)
        attention = self.self_attn
        q, k, v = split_heads(attention.qkv(self.norm1(x)), attention.heads)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + attention.proj(out) * gate_a
        return x + self.mlp(self.norm2(x)) * gate_f


class TextRefiner(nn.Module):
    """Text embeddings [B, L, text_dim] to text tokens [B, L, C], aware of the noise level."""

    def __init__(self, text_dim: int, hidden: int):
        super().__init__()
        self.input_embedder = nn.Linear(text_dim, hidden)
        self.t_embedder = Embedder(TIME_FEATURES, hidden)
        self.c_embedder = Embedder(text_dim, hidden)
        # The published name has one level more than is needed.
        blocks = nn.ModuleList(RefinerBlock(hidden) for _ in range(REFINER_BLOCKS))
        self.individual_token_refiner = nn.ModuleDict({"blocks": blocks})

    def forward(self, text: Tensor, time: Tensor) -> Tensor:
        vector = self.t_embedder(time) + self.c_embedder(text.mean(1))
        x = self.input_embedder(text)
        for block in self.individual_token_refiner["blocks"]:  # type: ignore[attr-defined]
            x = block(x, vector)
        return x


class DoubleBlock(nn.Module):
    """Video and text tokens with weights of their own, which attend to each other jointly."""

    def __init__(self, hidden: int):
        super().__init__()
        self.img_mod, self.txt_mod = Modulation(hidden, 6), Modulation(hidden, 6)
        self.img_attn, self.txt_attn = Projections(hidden), Projections(hidden)
        self.img_mlp = feed_forward(hidden, nn.GELU(approximate="tanh"))
        self.txt_mlp = feed_forward(hidden, nn.GELU(approximate="tanh"))

    def forward(
        self, img: Tensor, txt: Tensor, vector: Tensor, table: Tensor, observe: Observe | None
    ) -> tuple[Tensor, Tensor]:
        img_mod, txt_mod = self.img_mod(vector), self.txt_mod(vector)
        of_img = self.img_attn(modulated_norm(img, *img_mod[:2]))
        of_txt = self.txt_attn(modulated_norm(txt, *txt_mod[:2]))
        q, k, v = (torch.cat(pair, 2) for pair in zip(of_txt, of_img, strict=True))
        out = attend(q, k, v, table, observe)
        length = txt.shape[1]
        img = img + self.img_attn.proj(out[:, length:]) * img_mod[2]
        img = img + self.img_mlp(modulated_norm(img, *img_mod[3:5])) * img_mod[5]
        txt = txt + self.txt_attn.proj(out[:, :length]) * txt_mod[2]
        txt = txt + self.txt_mlp(modulated_norm(txt, *txt_mod[3:5])) * txt_mod[5]
        return img, txt


class SingleBlock(nn.Module):
    """Attention and feed-forward side by side over all tokens (as in arXiv:2302.05442)."""

    def __init__(self, hidden: int):
        super().__init__()
        self.heads, self.sizes = hidden // HEAD_DIM, (3 * hidden, MLP_RATIO * hidden)
        self.modulation = Modulation(hidden, 3)
        self.linear1 = nn.Linear(hidden, sum(self.sizes))
        self.linear2 = nn.Linear((1 + MLP_RATIO) * hidden, hidden)
        self.norm = HeadNorm()

    def forward(self, x: Tensor, vector: Tensor, table: Tensor, observe: Observe | None) -> Tensor:
        shift, scale, gate = self.modulation(vector)
        qkv, wide = self.linear1(modulated_norm(x, shift, scale)).split(self.sizes, -1)
        q, k, v = split_heads(qkv, self.heads)
        q, k = self.norm(q, k)
        out = attend(q, k, v, table, observe)
        wide = F.gelu(wide, approximate="tanh")
        return x + self.linear2(torch.cat([out, wide], -1)) * gate


class FinalLayer(nn.Module):
    """Modulated projection back to patches; the conditioning vector comes activated."""

    def __init__(self, hidden: int, channels: int, patch: tuple[int, int, int]):
        super().__init__()
        self.linear = nn.Linear(hidden, channels * math.prod(patch))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        project = self.adaLN_modulation[1]  # what comes before it, SiLU, is done
        shift, scale = project(vector)[:, None].chunk(2, -1)
        return self.linear(modulated_norm(x, shift, scale))
