"""Gathering on a CPU: one block of queries at a time, its keys in the core's cache.

The blocks of queries are dealt to worker threads. Matrix products of a block's height run near
the peak of a core, which the library's own attention does only for tall inputs. Half precision is
computed in float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import KeyLists
from .parts import dense_head, empty_output
from .workers import dealt, spread, worker_count

# Scratch memory, as a share of the bytes of q, k, v and the output, which dense attention needs.
SCRATCH = 1 / 32
LEAST_SCRATCH = 1 << 20  # per worker; less would not pay and is nothing next to a model
LEAST_RUN = 4  # key blocks gathered at once, however little that leaves
COPY_ROWS = 1024


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
                if order is None:
                    buffer[rows] = source[rows]
                else:
                    _take(source, order[rows], buffer[rows])

        spread(work, workers)


def _take(source: Tensor, rows: Tensor, into: Tensor) -> None:
    """Copy some rows of source [N, D]."""
    if source.dtype == into.dtype:
        torch.index_select(source, 0, rows, out=into)
    else:
        into.copy_(source.index_select(0, rows))


@dataclass(frozen=True, eq=False)
class _Views:
    """A scratch cut to a number of key blocks and a height of queries [n, D]. Taken once: every
    call into torch, even for a view, hands the interpreter to other threads and back."""

    keys: Tensor  # [blocks, bs, D]
    turned: Tensor  # the same as [D, blocks * bs]
    values: Tensor  # [blocks, bs, E], in the keys' place
    flat: Tensor  # the same as [blocks * bs, E]
    scores: Tensor  # [n, blocks * bs]
    q: Tensor  # [n, D]
    out: Tensor  # [n, E]


class _Scratch:
    """One worker's room for a run of gathered key blocks, their scores and a block's result."""

    def __init__(self, lists: KeyLists, head: _Head, most: int):
        bs, kind = lists.block, head.k.dtype
        self.dim, self.value_dim, self.block = head.k.shape[-1], head.v.shape[-1], bs
        width = max(self.dim, self.value_dim)
        # Heads that see everything do without.
        longest = max((max(c) for c, f in zip(lists.counts, lists.full) if not f), default=1)
        fits = most // ((width + bs) * bs * kind.itemsize)
        self.run = max(min(longest, fits), min(longest, LEAST_RUN))
        self.keys = torch.empty(self.run * bs * width, dtype=kind)
        self.scores = torch.empty(self.run * bs * bs, dtype=kind)
        self.q = torch.empty(bs, self.dim, dtype=kind)
        self.out = torch.empty(bs, self.value_dim, dtype=kind)
        self._views: dict[tuple[int, int], _Views] = {}

    def views(self, blocks: int, height: int) -> _Views:
        key = (blocks, height)
        if key not in self._views:
            n = blocks * self.block
            keys = self.keys[: n * self.dim].view(blocks, self.block, self.dim)
            values = self.keys[: n * self.value_dim].view(blocks, self.block, self.value_dim)
            self._views[key] = _Views(
                keys, keys.flatten(0, 1).T, values, values.flatten(0, 1),
                self.scores[: height * n].view(height, n), self.q[:height], self.out[:height],
            )  # fmt: skip
        return self._views[key]


def gather_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, scale: float, order: Tensor | None
) -> Tensor:
    """As ``gather.gather_attention``, on a CPU."""
    out = empty_output(q, v)
    group = q.shape[1] // k.shape[1]
    workers = min(worker_count(), lists.q_blocks)
    head = _Head(q, k, v, lists)
    held = sum(t.numel() * t.element_size() for t in (q, k, v, out))
    room = max(int(held * SCRATCH) // workers, LEAST_SCRATCH)
    scratch = [_Scratch(lists, head, room) for _ in range(workers)]
    places = None if order is None else order.split(lists.block)
    for b in range(q.shape[0]):
        loaded = -1
        for h in range(q.shape[1]):
            g = h // group
            if lists.full[h]:
                out[b, h] = dense_head(q[b, h], k[b, g], v[b, g], scale)
                continue
            if g != loaded:
                head.load(k[b, g], v[b, g], order, workers)
                loaded = g
            _one_head(q[b, h], out[b, h], head, lists, h, k.shape[2], scale, places, scratch)
    return out


def _one_head(
    q: Tensor,
    out: Tensor,
    head: _Head,
    lists: KeyLists,
    h: int,
    keys: int,
    scale: float,
    places: tuple[Tensor, ...] | None,
    scratch: list[_Scratch],
) -> None:
    """Fill ``out`` [N, E] with the attention of q [N, D] to the loaded keys. ``places`` are the
    tokens of each block of queries, None as they lie."""
    bs, counts, last = lists.block, lists.counts[h], lists.k_blocks - 1
    kept = lists.rows(h)
    # The last block of keys is the one that may be partly filled, and comes last in a list.
    missing = lists.k_blocks * bs - keys
    spare = [missing if has_last else 0 for has_last in lists.mask[h, :, last].tolist()]
    rows, results = (q.split(bs), out.split(bs)) if places is None else ((), ())
    # The longest lists first, so that no worker is left with a long one at the end.
    hand = dealt(sorted(range(lists.q_blocks), key=lambda i: -counts[i]))

    def work(slot: int) -> None:
        room = scratch[slot]
        for i in hand():
            if places is None:
                own = room.views(1, len(rows[i])).q
                own.copy_(rows[i])
                results[i].copy_(_attend(head, own, kept[i], spare[i], scale, room))
                continue
            own = room.views(1, len(places[i])).q
            _take(q, places[i], own)
            made = _attend(head, own, kept[i], spare[i], scale, room)
            out.index_copy_(0, places[i], made.to(out.dtype))

    spread(work, len(scratch))


def _attend(
    head: _Head, q: Tensor, kept: Tensor, spare: int, scale: float, room: _Scratch
) -> Tensor:
    """Queries [n, D] over the kept key blocks, of whose keys the last ``spare`` are none.

    A list too long for the scratch is taken in runs, joined by their softmax denominators
    (Milakov and Gimelshein, arXiv:1805.02867).
    """
    if len(kept) <= room.run:
        at = _scored(head, q, kept, spare, scale, room)
        _softmax_(at.scores)
        torch.index_select(head.v, 0, kept, out=at.values)
        return torch.mm(at.scores, at.flat, out=at.out)
    parts = kept.split(room.run)
    out = room.views(1, len(q)).out
    top = torch.full_like(q[:, :1], -torch.inf)
    total = torch.zeros_like(top)
    for number, part in enumerate(parts):
        final = number == len(parts) - 1
        at = _scored(head, q, part, spare if final else 0, scale, room)
        above = torch.maximum(top, at.scores.amax(-1, keepdim=True))
        shrink = (top - above).exp_()
        total.mul_(shrink).add_(at.scores.sub_(above).exp_().sum(-1, keepdim=True))
        torch.index_select(head.v, 0, part, out=at.values)
        if number:
            out.mul_(shrink).addmm_(at.scores, at.flat)
        else:
            torch.mm(at.scores, at.flat, out=out)
        top = above
    return out.div_(total)


def _scored(
    head: _Head, q: Tensor, part: Tensor, spare: int, scale: float, room: _Scratch
) -> _Views:
    """The scratch with the scores of q against some key blocks."""
    at = room.views(len(part), len(q))
    torch.index_select(head.k, 0, part, out=at.keys)
    torch.addmm(at.scores, q, at.turned, beta=0, alpha=scale, out=at.scores)
    if spare:
        at.scores[:, -spare:] = -torch.inf
    return at


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
