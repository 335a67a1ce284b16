"""Block-sparse attention in plain torch: gather the kept key blocks, then attend densely to them.

Works on every device and for every head dim. On a CPU it has a way of its own (``gather_cpu``);
elsewhere blocks of queries with about equally many keys are batched for the device's own kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import KeyLists
from .gather_cpu import gather_on_cpu
from .parts import dense_head, empty_output

BATCHED_BYTES = 1 << 25


def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, scale: float, order: Tensor | None = None
) -> Tensor:
    """Attention of q [B, H, N, D] to k [B, G, M, D], v [B, G, M, E] within the lists' blocks.

    G divides H (grouped heads). ``order`` [N] names the token at each place of the mask, for
    queries and keys alike; None takes them as they lie. The result is [B, H, N, E].
    """
    run = gather_on_cpu if q.device.type == "cpu" else gather_on_device
    return run(q, k, v, lists, scale, order)


def gather_on_device(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, scale: float, order: Tensor | None
) -> Tensor:
    out = empty_output(q, v)
    bs, group = lists.block, q.shape[1] // k.shape[1]
    indices = lists.kept(("gather", q.device), lambda: lists.indices.to(q.device).long())
    spare = lists.k_blocks * bs - k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // group
            if lists.full[h]:
                out[b, h] = dense_head(q[b, h], k[b, g], v[b, g], scale)
                continue
            queries = _blocks(q[b, h], order, lists.q_blocks, bs)
            key_blocks = _blocks(k[b, g], order, lists.k_blocks, bs)
            values = _blocks(v[b, g], order, lists.k_blocks, bs)
            made = values.new_empty(lists.q_blocks, bs, v.shape[-1])
            for rows, longest in _batches(lists, h, _batch_rows(lists, h, k, v)):
                at = torch.tensor(rows, device=q.device)
                picked = indices[h, at, :longest]
                hidden = _hidden(lists, h, rows, longest, spare, q.device)
                made[at] = F.scaled_dot_product_attention(
                    queries[at][:, None],
                    key_blocks[picked].flatten(1, 2)[:, None],
                    values[picked].flatten(1, 2)[:, None],
                    attn_mask=hidden,
                    scale=scale,
                )[:, 0]
            result = made.flatten(0, 1)[: q.shape[2]]
            if order is None:
                out[b, h] = result
            else:
                out[b, h].index_copy_(0, order, result)
    return out


def _blocks(tokens: Tensor, order: Tensor | None, count: int, bs: int) -> Tensor:
    """Tokens [N, D] in the mask's order, as blocks [count, bs, D], the last filled with zeros."""
    if order is not None:
        tokens = tokens[order]
    spare = count * bs - len(tokens)
    return (F.pad(tokens, (0, 0, 0, spare)) if spare else tokens).unflatten(0, (count, bs))


def _batch_rows(lists: KeyLists, h: int, k: Tensor, v: Tensor) -> int:
    each = max(lists.counts[h]) * lists.block * (k.shape[-1] + v.shape[-1]) * k.element_size()
    return max(1, BATCHED_BYTES // each)


def _batches(lists: KeyLists, h: int, most: int) -> list[tuple[list[int], int]]:
    """Query blocks of a head in batches of nearly equal list length, with the longest of each."""
    counts = lists.counts[h]
    by_length = sorted(range(lists.q_blocks), key=lambda i: counts[i])
    parts = [by_length[i : i + most] for i in range(0, len(by_length), most)]
    return [(rows, counts[rows[-1]]) for rows in parts]


def _hidden(
    lists: KeyLists, h: int, rows: list[int], longest: int, spare: int, device: torch.device
) -> Tensor | None:
    """Bool [rows, 1, 1, keys], False where a gathered key is filler; None if none is."""
    last = lists.k_blocks - 1
    lengths = []
    for i in rows:
        count = lists.counts[h][i]
        partly = spare and int(lists.indices[h, i, count - 1]) == last
        lengths.append(count * lists.block - (spare if partly else 0))
    width = longest * lists.block
    if min(lengths) == width:
        return None
    shown = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return shown[:, None, None].to(device)
