"""Block-sparse attention behind one function, with several back ends."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from .blocks import KeyLists, block_count, expand, pack_bits, unpack_bits
from .choose import BACKENDS, ranked
from .flex import flex_attention
from .fused import fused_attention
from .gather import gather_attention
from .parts import Unavailable

__all__ = [
    "BACKENDS",
    "KeyLists",
    "Unavailable",
    "block_count",
    "dense_attention",
    "expand",
    "pack_bits",
    "ranked",
    "sparse_attention",
    "unpack_bits",
]

log = logging.getLogger("carnator")
_told: set[str] = set()


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | KeyLists,
    *,
    block: int | None = None,
    backend: str = "auto",
    scale: float | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Softmax attention of q [B, H, N, D] to k [B, G, M, D] and v [B, G, M, E], only within the
    blocks of a mask: the result [B, H, N, E] of dense attention with the mask spelt out.

    Args:
        mask: which blocks of keys each block of queries sees, per head and for the whole batch:
            bool [H, ceil(N / block), ceil(M / block)], the same packed by ``pack_bits``, or
            ``KeyLists`` made of it, which is best when it serves more than one call. G must
            divide H. N and M need not be multiples of the block.
        block: tokens per block; may be left away with KeyLists.
        backend: "auto" takes what is expected to be fastest; where that is dense attention, the
            mask is not applied. "gather", "flex", "fused" and "dense" are taken at one's word.
        scale: of the scores; 1 / sqrt(D) if None.
        order: int64 [N], the token at each place of the mask, when N = M; None means as they lie.

    Raises ValueError for shapes that do not fit together, Unavailable (a RuntimeError) when a
    back end asked for by name cannot serve the call.
    """
    lists = mask if isinstance(mask, KeyLists) else _lists(mask, block, k)
    _check(q, k, v, lists, block, order)
    if backend not in BACKENDS:
        raise ValueError(f"There is no back end {backend!r}; choose one of {', '.join(BACKENDS)}.")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    for name in ranked(q, k, v, lists) if backend == "auto" else [backend]:
        try:
            return RUN[name](q, k, v, lists, scale, order)
        except Unavailable as error:
            if backend != "auto":
                raise
            _tell(f"[Carnator] {name} attention is not used: {error}")
    return dense_attention(q, k, v, scale)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Plain attention, heads grouped where k has fewer."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)


def _dense(q: Tensor, k: Tensor, v: Tensor, _: KeyLists, scale: float, __: Tensor | None) -> Tensor:
    return dense_attention(q, k, v, scale)


RUN: dict[str, Callable[[Tensor, Tensor, Tensor, KeyLists, float, Tensor | None], Tensor]] = {
    "dense": _dense,
    "gather": gather_attention,
    "flex": flex_attention,
    "fused": fused_attention,
}


def _lists(mask: Tensor, block: int | None, k: Tensor) -> KeyLists:
    if block is None or block < 1:
        raise ValueError(f"The block size is {block}; give the tokens per block, 1 or more.")
    return KeyLists(mask, block, block_count(k.shape[2], block))


def _check(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, block: int | None, order: Tensor | None
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (
        q.ndim == k.ndim == v.ndim == 4
        and q.shape[0] == k.shape[0]
        and k.shape[:3] == v.shape[:3]
        and q.shape[3] == k.shape[3]
        and q.shape[1] % k.shape[1] == 0
    ):
        raise ValueError(
            f"Attention needs q [B, H, N, D], k [B, G, M, D], v [B, G, M, E]: got {shapes}."
        )
    if block is not None and block != lists.block:
        raise ValueError(f"The lists are of blocks of {lists.block}, the call says {block}.")
    expected = (q.shape[1], *(block_count(t.shape[2], lists.block) for t in (q, k)))
    if tuple(lists.mask.shape) != expected:
        raise ValueError(
            f"The block mask is {tuple(lists.mask.shape)}; for {shapes} and blocks of "
            f"{lists.block} it must be {expected}."
        )
    if order is not None and not (q.shape[2] == k.shape[2] == len(order)):
        raise ValueError(f"The order names {len(order)} tokens, but the call has {shapes}.")


def _tell(message: str) -> None:
    if message not in _told:
        _told.add(message)
        log.info(message)
