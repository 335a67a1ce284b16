"""What several back ends share: reordering in parts, and an exact sample to trust them by."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import KeyLists

# The share of the heads that is copied into the mask's order at a time, so that the copies stay
# small next to q, k, v and the output.
PART = 1 / 12
SAMPLED_HEADS = 3
SAMPLED_BLOCKS = 3


class Unavailable(RuntimeError):
    """A back end cannot serve this call; the message says why."""


Run = Callable[[Tensor, Tensor, Tensor, slice], Tensor]


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """[B, H, N, E], lying in memory as [B, N, H, E]: hosts reshape to that without a copy."""
    b, h, n, _ = q.shape
    return q.new_empty(b, n, h, v.shape[-1]).transpose(1, 2)


def dense_head(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """A head that sees everything: q [N, D], k [M, D], v [M, E]."""
    q, k, v = (t[None, None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale)[0, 0]


def in_parts(run: Run, q: Tensor, k: Tensor, v: Tensor, order: Tensor | None) -> Tensor:
    """``run(q, k, v, heads)`` over all heads, with tokens in ``order`` [N] and back again.

    Tokens that need no reordering are run at once, others some heads at a time, all parts of the
    same size.
    """
    heads, grouped = q.shape[1], k.shape[1]
    if order is None:
        return run(q, k, v, slice(0, heads))
    each = max(n for n in range(1, grouped + 1) if grouped % n == 0 and n <= max(1, PART * grouped))
    size = heads // grouped * each
    out = empty_output(q, v)
    for i in range(grouped // each):
        part, kv = slice(i * size, (i + 1) * size), slice(i * each, (i + 1) * each)
        made = run(
            q[:, part].index_select(2, order),
            k[:, kv].index_select(2, order),
            v[:, kv].index_select(2, order),
            part,
        )
        out[:, part].index_copy_(2, order, made)
    return out


def check(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: KeyLists,
    scale: float,
    order: Tensor | None,
    tolerance: float,
) -> None:
    """Compare some blocks of an attention output with exact softmax attention.

    Raises Unavailable when their relative root-mean-square error is above ``tolerance``.
    """
    group, bs = q.shape[1] // k.shape[1], lists.block
    error = size = 0.0
    for h in _spaced(q.shape[1], SAMPLED_HEADS):
        for i in _spaced(lists.q_blocks, SAMPLED_BLOCKS):
            rows = torch.arange(i * bs, min((i + 1) * bs, q.shape[2]))
            kept = lists.indices[h, i, : lists.counts[h][i]].long()
            columns = (kept[:, None] * bs + torch.arange(bs)).flatten()
            columns = columns[columns < k.shape[2]]
            rows, columns = rows.to(q.device), columns.to(q.device)
            if order is not None:
                rows, columns = order[rows], order[columns]
            keys, values = k[0, h // group, columns].double(), v[0, h // group, columns].double()
            scores = q[0, h, rows].double() @ keys.T * scale
            exact = torch.softmax(scores, -1) @ values
            error += float((out[0, h, rows].double() - exact).square().sum())
            size += float(exact.square().sum())
    relative = (error / size) ** 0.5 if size else error**0.5
    if not relative <= tolerance:
        raise Unavailable(f"its result is off by {relative:.2g} of the exact one")


def _spaced(count: int, most: int) -> list[int]:
    """At most ``most`` of 0 to count - 1, evenly spaced, the first and the last among them."""
    return sorted({round(i * (count - 1) / max(1, most - 1)) for i in range(most)})
