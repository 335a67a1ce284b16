"""Block-sparse attention in plain torch: gather the kept key blocks, then attend densely to them.

Works on every device and for every head dim. On a CPU the blocks of queries are dealt to worker
threads, one block at a time, so that what a block gathers stays in that core's cache; matrix
products of a block's height run near the peak there, which the library's own attention does only
for tall inputs. Elsewhere blocks with equally many keys are batched for the device's own kernel.
Half precision is computed in float32 on a CPU.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import KeyLists
from .parts import empty_output
from .workers import dealt, spread, worker_count

# Scratch memory, as a share of the bytes of q, k, v and the output, which dense attention needs.
SCRATCH = 1 / 32
LEAST_SCRATCH = 1 << 20  # per worker; less would not pay and is nothing next to a model
LEAST_RUN = 4  # key blocks gathered at once, however little that leaves
COPY_ROWS = 1024
BATCHED_BYTES = 1 << 25


def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, scale: float, order: Tensor | None = None
) -> Tensor:
    """Attention of q [B, H, N, D] to k [B, G, M, D], v [B, G, M, E] within the lists' blocks.

    G divides H (grouped heads). ``order`` [N] names the token at each place of the mask, for
    queries and keys alike; None takes them as they lie. The result is [B, H, N, E].
    """
    run = _on_cpu if q.device.type == "cpu" else _on_device
    return run(q, k, v, lists, scale, order)


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """A head that sees everything: q [N, D], k [M, D], v [M, E]."""
    q, k, v = (t[None, None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale)[0, 0]


# --- CPU ---------------------------------------------------------------------------------------


class _Head:
    """One head's keys and values as whole blocks in the mask's order; reused head by head."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, lists: KeyLists):
        kind = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.k = torch.empty(lists.k_blocks, lists.block, k.shape[-1], dtype=kind)
        self.v = torch.empty(lists.k_blocks, lists.block, v.shape[-1], dtype=kind)
        for buffer in (self.k, self.v):
            buffer.flatten(0, 1)[k.shape[2] :] = 0

    def load(self, k: Tensor, v: Tensor, order: Tensor | None, workers: int) -> None:
        """Copy a head's keys [M, D] and values [M, E]."""
        jobs = [
            (source, buffer.flatten(0, 1), slice(start, min(start + COPY_ROWS, len(source))))
            for source, buffer in ((k, self.k), (v, self.v))
            for start in range(0, len(source), COPY_ROWS)
        ]
        hand = dealt(range(len(jobs)))

        def work(_: int) -> None:
            for i in hand():
                source, buffer, rows = jobs[i]
                _take(source, rows, order, buffer[rows])

        spread(work, workers)


def _take(source: Tensor, rows: slice, order: Tensor | None, into: Tensor) -> None:
    """Copy the tokens at places ``rows`` of the mask's order."""
    if order is None:
        into.copy_(source[rows])
    elif source.dtype == into.dtype:
        torch.index_select(source, 0, order[rows], out=into)
    else:
        into.copy_(source.index_select(0, order[rows]))


class _Scratch:
    """One worker's room for a run of gathered key blocks, their scores and a block's result."""

    def __init__(self, lists: KeyLists, head: _Head, most: int):
        bs, kind = lists.block, head.k.dtype
        width = max(head.k.shape[-1], head.v.shape[-1])
        longest = max(max(row) for row in lists.counts)
        fits = most // ((width + bs) * bs * kind.itemsize)
        self.run = max(min(longest, fits), min(longest, LEAST_RUN))
        self.keys = torch.empty(self.run * bs * width, dtype=kind)
        self.scores = torch.empty(self.run * bs * bs, dtype=kind)
        self.q = torch.empty(bs, head.k.shape[-1], dtype=kind)
        self.out = torch.empty(bs, head.v.shape[-1], dtype=kind)


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, scale: float, order: Tensor | None
) -> Tensor:
    out = empty_output(q, v)
    group = q.shape[1] // k.shape[1]
    workers = min(worker_count(), lists.q_blocks)
    head = _Head(q, k, v, lists)
    held = sum(t.numel() * t.element_size() for t in (q, k, v, out))
    room = max(int(held * SCRATCH) // workers, LEAST_SCRATCH)
    scratch = [_Scratch(lists, head, room) for _ in range(workers)]
    for b in range(q.shape[0]):
        loaded = -1
        for h in range(q.shape[1]):
            g = h // group
            if lists.full[h]:
                out[b, h] = _dense(q[b, h], k[b, g], v[b, g], scale)
                continue
            if g != loaded:
                head.load(k[b, g], v[b, g], order, workers)
                loaded = g
            _head_on_cpu(q[b, h], out[b, h], head, lists, h, k.shape[2], scale, order, scratch)
    return out


def _head_on_cpu(
    q: Tensor,
    out: Tensor,
    head: _Head,
    lists: KeyLists,
    h: int,
    keys: int,
    scale: float,
    order: Tensor | None,
    scratch: list[_Scratch],
) -> None:
    """Fill ``out`` [N, E] with the attention of q [N, D] to the loaded keys."""
    bs, counts, indices = lists.block, lists.counts[h], lists.indices[h]
    # The longest lists first, so that no worker is left with a long one at the end.
    hand = dealt(sorted(range(lists.q_blocks), key=lambda i: -counts[i]))
    last, filled = lists.k_blocks - 1, keys - (lists.k_blocks - 1) * bs

    def work(slot: int) -> None:
        for i in hand():
            kept = indices[i, : counts[i]]
            # The last block of keys is the one that may be partly filled, and comes last.
            spare = bs - filled if int(kept[-1]) == last else 0
            place = slice(i * bs, min((i + 1) * bs, len(q)))
            room = scratch[slot]
            rows = room.q[: place.stop - place.start]
            _take(q, place, order, rows)
            made = _attend(head, rows.mul_(scale), kept, spare, room)
            if order is None:
                out[place] = made
            else:
                out.index_copy_(0, order[place], made.to(out.dtype))

    spread(work, len(scratch))


def _attend(head: _Head, q: Tensor, kept: Tensor, spare: int, room: _Scratch) -> Tensor:
    """Scaled queries [n, D] over the kept key blocks, of whose keys the last ``spare`` are none.

    A list too long for the scratch is taken in runs, joined by their softmax denominators
    (Milakov and Gimelshein, arXiv:1805.02867).
    """
    height, bs = len(q), head.k.shape[1]
    out = room.out[:height]
    top: Tensor | None = None
    total: Tensor | None = None
    for start in range(0, len(kept), room.run):
        part = kept[start : start + room.run]
        n = len(part) * bs
        scores = room.scores[: height * n].view(height, n)
        torch.mm(q, _gathered(head.k, part, room).T, out=scores)
        if spare and start + room.run >= len(kept):
            scores[:, n - spare :] = -torch.inf
        if len(kept) <= room.run:
            _softmax_(scores)
            return torch.mm(scores, _gathered(head.v, part, room), out=out)
        here = scores.amax(-1, keepdim=True)
        above = here if top is None else torch.maximum(top, here)
        summed = scores.sub_(above).exp_().sum(-1, keepdim=True)
        values = _gathered(head.v, part, room)
        if top is None or total is None:
            total = summed
            torch.mm(scores, values, out=out)
        else:
            shrink = (top - above).exp_()
            total = total * shrink + summed
            out.mul_(shrink).addmm_(scores, values)
        top = above
    return out if total is None else out.div_(total)


def _gathered(blocks: Tensor, part: Tensor, room: _Scratch) -> Tensor:
    """The key blocks ``part`` of blocks [K, bs, D], copied together as [len(part) bs, D]."""
    _, bs, width = blocks.shape
    place = room.keys[: len(part) * bs * width].view(len(part), bs, width)
    torch.index_select(blocks, 0, part, out=place)
    return place.flatten(0, 1)


def _softmax_(scores: Tensor) -> None:
    if _softmax_in_place():
        torch.softmax(scores, -1, out=scores)
    else:
        scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        scores.div_(scores.sum(-1, keepdim=True))


@functools.cache
def _softmax_in_place() -> bool:
    """Whether this torch can write a softmax over its own input, which it does not promise."""
    with torch.no_grad():
        x = torch.linspace(-9, 9, 7 * 1031, dtype=torch.float32).view(7, 1031)
        expected = torch.softmax(x, -1)
        try:
            return torch.equal(torch.softmax(x, -1, out=x), expected)
        except RuntimeError:
            return False


# --- other devices -----------------------------------------------------------------------------


def _on_device(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, scale: float, order: Tensor | None
) -> Tensor:
    out = empty_output(q, v)
    bs, group = lists.block, q.shape[1] // k.shape[1]
    indices = lists.kept(("gather", q.device), lambda: lists.indices.to(q.device))
    spare = lists.k_blocks * bs - k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // group
            if lists.full[h]:
                out[b, h] = _dense(q[b, h], k[b, g], v[b, g], scale)
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
