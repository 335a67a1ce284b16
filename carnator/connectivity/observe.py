"""Observing which blocks of keys each block of queries attends to, without a dense map.

Block scores come from pooled queries and keys, some hundred times fewer than tokens. How much of
the score each head must keep is set by a few query rows computed exactly: the pooled map ranks
the blocks, the exact rows say where to cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import Layout

ROWS = 64
# Blocks are pooled in this many parts, by place: one mean over a block hides what stands out.
PARTS = 4
RECALL = 0.95  # of a row's attention mass, which a mask must hold to be used
TARGET = 0.97  # which an observed mask is cut to, so that it holds for a little while
BUDGET = 0.5  # the most blocks a head's mask may keep
GOLDEN = 0.6180339887498949


@dataclass(frozen=True, eq=False)
class Observed:
    """Masks bool [H, blocks, blocks] of one attention call, and the share [H] of exactly computed
    rows' mass that they hold. A head whose budget did not hold enough is not ``sparse``."""

    mask: Tensor
    recall: Tensor

    @property
    def sparse(self) -> Tensor:
        return self.recall >= RECALL


@dataclass(frozen=True, eq=False)
class Rows:
    """Sampled query rows: their tokens int64 [R] and their blocks int64 [R]."""

    tokens: Tensor
    blocks: Tensor


def sample_rows(layout: Layout, turn: int = 0, count: int = ROWS) -> Rows:
    """Query rows spread evenly over the blocks, others every ``turn``; the same every time."""
    count = min(count, layout.tokens)
    # Each row at another place within its stretch: with one shift for all, rows could fall on
    # the same place of every block, the middle say, where more of the attention is near.
    step = torch.arange(count, dtype=torch.float64)
    shift = (turn * GOLDEN + step * GOLDEN) % 1.0
    places = ((step + shift) * (layout.tokens / count)).long()
    places.clamp_(max=layout.tokens - 1)
    return Rows(layout.order[places], places // layout.block)


def row_mass(q: Tensor, k: Tensor, layout: Layout, rows: Rows, scale: float) -> Tensor:
    """The exact attention mass float32 [B, H, R, blocks] of sampled rows in each key block, of
    q [B, H, N, D] and k [B, G, N, D]."""
    tokens = rows.tokens.to(q.device)
    group = q.shape[1] // k.shape[1]
    made = torch.empty(*q.shape[:2], len(tokens), layout.blocks, device=q.device)
    for b in range(q.shape[0]):
        for g in range(k.shape[1]):  # one head at a time: a row is as long as the sequence
            keys = _placed(k[b, g], layout).T
            for h in range(g * group, (g + 1) * group):
                scores = (q[b, h, tokens].float() @ keys).mul_(scale)
                scores[:, layout.tokens :] = -torch.inf
                share = torch.softmax(scores, -1).unflatten(-1, (layout.blocks, -1))
                torch.sum(share, -1, out=made[b, h])
    return made


def block_scores(q: Tensor, k: Tensor, layout: Layout, scale: float, parts: int = PARTS) -> Tensor:
    """Estimated attention mass float32 [H, blocks, blocks] between blocks of q [H, N, D] and
    k [G, N, D]: softmax attention among means over parts of blocks."""
    parts = min(parts, layout.block)
    group = len(q) // len(k)
    made = torch.empty(len(q), layout.blocks, layout.blocks, device=q.device)
    for h in range(len(q)):
        queries, filled = _pooled(q[h], layout, parts)
        keys, _ = _pooled(k[h // group], layout, parts)
        scores = queries @ keys.T * scale + filled.log()
        share = torch.softmax(scores, -1).unflatten(-1, (layout.blocks, parts)).sum(-1)
        weight = filled.view(layout.blocks, parts, 1)
        rows = share.view(layout.blocks, parts, layout.blocks)
        made[h] = (rows * weight).sum(1) / weight.sum(1)
    return made


def _pooled(x: Tensor, layout: Layout, parts: int) -> tuple[Tensor, Tensor]:
    """Means [blocks * parts, D] of x [N, D] over parts of blocks, and how many tokens each has."""
    size = -(-layout.block // parts)
    spare = parts * size - layout.block
    cells = _placed(x, layout).unflatten(0, (layout.blocks, layout.block))
    sums = F.pad(cells, (0, 0, 0, spare)).view(layout.blocks * parts, size, -1).sum(1)
    there = torch.arange(layout.blocks * layout.block, device=x.device) < layout.tokens
    filled = F.pad(there.view(layout.blocks, -1), (0, spare)).view(len(sums), size).sum(1).float()
    return sums / filled.clamp_min(1)[:, None], filled


def _placed(x: Tensor, layout: Layout) -> Tensor:
    """x [N, D] in the order of the masks, as float32 [blocks * block, D], filled with zeros."""
    moved = x.index_select(0, layout.order.to(x.device)).float()
    spare = layout.blocks * layout.block - layout.tokens
    return F.pad(moved, (0, 0, 0, spare)) if spare else moved


def observe(
    q: Tensor,
    k: Tensor,
    layout: Layout,
    scale: float,
    *,
    turn: int = 0,
    target: float = TARGET,
    budget: float = BUDGET,
    parts: int = PARTS,
) -> Observed:
    """The masks of one self-attention call of q [H, N, D] and k [G, N, D], tokens as they lie.

    Per head the fewest blocks, in the order of their scores, with which the sampled rows keep
    ``target`` of their mass on average, but at most ``budget`` of all blocks, and what the
    layout always keeps on top.
    """
    rows = sample_rows(layout, turn)
    mass = row_mass(q[None], k[None], layout, rows, scale)[0]
    scores = block_scores(q, k, layout, scale, parts)
    scores = scores.masked_fill(layout.always.to(scores.device), torch.inf)
    return cut(scores, mass, rows, layout, target, budget)


def cut(
    scores: Tensor, mass: Tensor, rows: Rows, layout: Layout, target: float, budget: float
) -> Observed:
    """Masks from scores [H, blocks, blocks] (infinite: always kept) by the exact mass [H, R,
    blocks] of some rows.

    The finite scores of a row, sorted, are added up; a block is kept while the sum before it is
    below a share p of the whole. p is found per head by bisection.
    """
    always = torch.isinf(scores)
    finite = scores.masked_fill(always, 0.0)
    ranked = scores.sort(-1, descending=True)
    sums = finite.gather(-1, ranked.indices).cumsum(-1)
    before = (sums - finite.gather(-1, ranked.indices)) / sums[..., -1:].clamp_min(1e-30)
    forced = torch.isinf(ranked.values)
    affordable = torch.arange(layout.blocks, device=scores.device) < budget * layout.blocks
    at = rows.blocks.to(scores.device)
    sampled = mass.gather(-1, ranked.indices[:, at])

    def kept(p: Tensor, which: Tensor | slice) -> Tensor:
        """Which of the sorted blocks are kept at shares p [H]."""
        return forced[:, which] | (affordable & (before[:, which] < p[:, None, None]))

    low = torch.zeros(len(scores), device=scores.device)
    high = torch.full_like(low, 1.0 + 1e-6)
    for _ in range(12):
        middle = (low + high) / 2
        enough = (sampled * kept(middle, at)).sum(-1).mean(-1) >= target
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle)
    recall = (sampled * kept(high, at)).sum(-1).mean(-1)
    chosen = kept(high, slice(None))
    mask = torch.zeros_like(chosen).scatter_(-1, ranked.indices, chosen)
    return Observed(mask.cpu(), recall.cpu())
