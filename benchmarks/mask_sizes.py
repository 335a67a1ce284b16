"""How large are packed masks at real geometries? ``python -m benchmarks.attention --sizes``

No real checkpoint is at hand, so attention is made up: each head looks near, some heads nearer
than others, and for tokens like its own, through random weights over a field that is smooth in
space and time, plus noise that grows with sigma. Other runs are other fields under the same
weights. Packed sizes therefore say what to expect of masks as local and as alike as these; the
size of the bitmaps, which packed masks hardly exceed, is exact for any.

Some layers are measured and scaled to all of them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carnator.attention import dense_attention
from carnator.connectivity import (
    Geometry,
    Layer,
    Layout,
    Measured,
    Packed,
    Recorder,
    Static,
    layout,
    majority,
    pack,
)

SIGMAS = (0.95, 0.80, 0.50)
FIELD = 48  # channels of the made-up tokens
DONORS = 3  # runs behind the measured template
HEAD_DIM = 128
# Scores of tokens at one place, and of tokens alike; how far heads reach, in widths of the frame.
NEAR, ALIKE = 14.0, 4.0
REACH = (0.1, 0.6)


@dataclass(frozen=True)
class Geometries:
    """A backbone at a size: layers and heads of self-attention, and its grid of tokens."""

    name: str
    layers: int
    heads: int
    grid: tuple[int, int, int]
    measured_layers: int
    measured_heads: int


REAL = (
    Geometries("Wan 1.3B, 480p, 81 frames", 30, 12, (21, 30, 52), 2, 12),
    Geometries("Wan 14B, 720p, 81 frames", 40, 40, (21, 45, 80), 1, 5),
)
QUICK = tuple(Geometries(g.name, g.layers, g.heads, g.grid, 1, 4) for g in REAL)


def field(grid: tuple[int, int, int], seed: int) -> Tensor:
    """Tokens [N, FIELD]: noise smooth over space and time at three scales, of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(FIELD, *grid)
    for scale in (2, 4, 8):
        coarse = [max(2, -(-n // s)) for n, s in zip(grid, (max(1, scale // 2), scale, scale))]
        noise = torch.randn(1, FIELD, *coarse, generator=generator)
        total += F.interpolate(noise, size=grid, mode="trilinear")[0]
    return F.normalize(total.flatten(1).T, dim=-1) * FIELD**0.5


class Weights:
    """One layer, the same for every run: half of a head looks near, half looks for its like."""

    def __init__(self, heads: int, number: int):
        generator = torch.Generator().manual_seed(1000 + number)
        half = HEAD_DIM // 2
        self.waves = torch.randn(heads, half // 2, 3, generator=generator)
        shared = torch.randn(heads, FIELD, half, generator=generator)
        own = torch.randn(2, heads, FIELD, half, generator=generator)
        self.q, self.k = ((shared + 0.7 * o) / FIELD**0.5 for o in own)
        order = torch.randperm(heads, generator=generator)
        self.reach = torch.linspace(*REACH, heads)[order]

    def __call__(self, tokens: Tensor, place: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """q and k [N, D] of one head. The first half is a random feature map of a Gaussian kernel
        over places (Rahimi and Recht, 2007), whose scores reach NEAR where places agree."""
        angle = place @ self.waves[head].T / self.reach[head]
        near = torch.cat([angle.cos(), angle.sin()], -1) * (2 / HEAD_DIM) ** 0.5 * 2**0.5
        made = []
        for weight in (self.q[head], self.k[head]):
            alike = F.normalize(tokens @ weight, dim=-1)
            joined = torch.cat([near * NEAR**0.5, alike * ALIKE**0.5], -1)
            made.append(joined * HEAD_DIM**0.25)
        return made[0], made[1]


def recorded(
    g: Geometries, at: Layout, seed: int, static: Static
) -> tuple[list[list[Layer | None]], float]:
    """Masks [anchor][layer] of a made-up dense run, and seconds per head of observing."""
    place = torch.stack(torch.meshgrid(*map(torch.arange, g.grid), indexing="ij"), -1)
    place = place.reshape(-1, 3) / max(g.grid[1:])
    clean = field(g.grid, seed)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    recorder = Recorder(at, g.measured_layers, g.measured_heads, len(SIGMAS))
    spent = 0.0
    for anchor, sigma in enumerate(SIGMAS):
        # What a model knows of its target at this noise level, and what is still noise to it.
        tokens = (1 - sigma / 2) * clean + sigma / 2 * noise
        for number in range(g.measured_layers):
            weights = Weights(g.measured_heads, number)
            pairs = [weights(tokens, place, h) for h in range(g.measured_heads)]
            q, k = (torch.stack(parts) for parts in zip(*pairs))
            began = time.perf_counter()
            recorder.see(anchor, number, q, k)
            spent += time.perf_counter() - began
    calls = len(SIGMAS) * g.measured_layers * g.measured_heads
    packed = Packed(recorder.pack(SIGMAS, static), recorder.geometry, static)
    layers = [[packed.layer(a, i) for i in range(g.measured_layers)] for a in range(len(SIGMAS))]
    return layers, spent / calls


def size_of(g: Geometries) -> dict[str, Any]:
    """One geometry's figures, in MiB for all layers, heads and anchors."""
    at = layout(g.grid)
    geometry = Geometry.of(at, g.measured_layers, g.measured_heads)
    static = Static(at, g.measured_heads)
    runs = [recorded(g, at, seed, static) for seed in range(DONORS + 1)]
    own, observing = runs[-1][0], sum(spent for _, spent in runs) / len(runs)
    shared = [
        [majority([run[0][a][i] for run in runs[:DONORS]]) for i in range(g.measured_layers)]
        for a in range(len(SIGMAS))
    ]
    measured = Measured(Packed(pack(shared, SIGMAS, geometry, static), geometry, static))
    scale = g.layers * g.heads / (g.measured_layers * g.measured_heads) / 2**20
    there = [layer for row in own for layer in row if layer is not None]
    sparse = sum(int(layer.sparse.sum()) for layer in there)
    kept = sum(float(layer.mask[layer.sparse].float().mean((1, 2)).sum()) for layer in there)
    heads = len(SIGMAS) * g.measured_layers * g.measured_heads
    return {
        "geometry": g.name,
        "tokens": at.tokens,
        "blocks": at.blocks,
        "measured": f"{g.measured_layers} of {g.layers} layers, "
        f"{g.measured_heads} of {g.heads} heads",
        "sparse_heads": round(sparse / heads, 3),
        "density": round(kept / max(1, sparse), 3),
        "bitmap_mib": round(heads * geometry.blocks * geometry.row * scale, 2),
        "static_template_mib": round(len(pack(own, SIGMAS, geometry, static)) * scale, 2),
        "measured_template_mib": round(len(pack(own, SIGMAS, geometry, measured)) * scale, 2),
        "observe_share_of_attention": round(observing / dense_seconds(at.tokens), 4),
    }


def dense_seconds(tokens: int) -> float:
    """Seconds of one head's dense attention, from a slice of its queries."""
    part = min(tokens, 2048)
    q, k, v = (torch.randn(1, 1, n, HEAD_DIM) for n in (part, tokens, tokens))
    dense_attention(q, k, v)
    began = time.perf_counter()
    dense_attention(q, k, v)
    return (time.perf_counter() - began) * math.ceil(tokens / part)


def sizes(quick: bool) -> list[dict[str, Any]]:
    """All geometries' figures, printed as they come."""
    found = []
    for g in QUICK if quick else REAL:
        s = size_of(g)
        print(
            f"{s['geometry']}: {s['blocks']} blocks, {s['sparse_heads']:.0%} of heads sparse at "
            f"density {s['density']}; {len(SIGMAS)} noise levels take {s['bitmap_mib']} MiB as "
            f"bitmaps, {s['static_template_mib']} MiB packed against the static template, "
            f"{s['measured_template_mib']} MiB against the majority of {DONORS} other runs; "
            f"observing a call costs {s['observe_share_of_attention']:.1%} of its attention "
            f"({s['measured']} measured, made-up attention)",
            flush=True,
        )
        found.append(s)
    return found
