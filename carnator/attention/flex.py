"""Block-sparse attention by torch's own ``flex_attention``, with a mask built from key lists.

It has to be compiled, once for every combination of shapes, which takes some seconds and needs
a working compiler (Triton on CUDA, C++ on a CPU). Uncompiled, flex_attention would ignore the
lists, so the first result of every combination is compared with an exact sample.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import KeyLists
from .parts import Unavailable, check, in_parts

# Compiled code is kept for good; further shapes in one process are left to other back ends.
MOST_SHAPES = 16
# Relative error against the exact sample; float32 may be computed as TF32.
TOLERANCE = {torch.float32: 5e-3, torch.float64: 5e-3}
HALF_TOLERANCE = 3e-2

_functions: dict[tuple[Any, ...], Callable[..., Tensor]] = {}
_trusted: set[tuple[Any, ...]] = set()
_refused: dict[tuple[Any, ...], str] = {}


def available(q: Tensor) -> bool:
    """Whether it can be tried on q's device with this torch."""
    return _library() is not None and q.device.type in ("cpu", "cuda")


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, scale: float, order: Tensor | None = None
) -> Tensor:
    """As ``gather.gather_attention``. Raises Unavailable where it cannot be used."""
    if not available(q):
        raise Unavailable("this torch has no flex_attention for the device")
    shape = (*_shape(q, k, v, lists), order is None)
    if shape in _refused:
        raise Unavailable(_refused[shape])

    def run(q: Tensor, k: Tensor, v: Tensor, heads: slice) -> Tensor:
        function, mask = _function(_shape(q, k, v, lists)), _block_mask(lists, heads, q, k)
        return function(_library().flex_attention, q, k, v, mask, scale)

    try:
        out = in_parts(run, q, k, v, order)
        if shape not in _trusted:
            tolerance = TOLERANCE.get(q.dtype, HALF_TOLERANCE)
            check(out, q, k, v, lists, scale, order, tolerance)
            _trusted.add(shape)
    except Exception as error:  # compilers raise errors of all kinds
        _refused[shape] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise Unavailable(_refused[shape]) from error
    return out


@functools.cache
def _library() -> Any:
    try:
        from torch.nn.attention import flex_attention as library
    except ImportError:
        return None
    return library


def _shape(q: Tensor, k: Tensor, v: Tensor, lists: KeyLists) -> tuple[Any, ...]:
    return (q.device, q.dtype, tuple(q.shape), tuple(k.shape), v.shape[-1], lists.block)


def _function(shape: tuple[Any, ...]) -> Callable[..., Tensor]:
    if shape not in _functions:
        if len(_functions) >= MOST_SHAPES:
            raise Unavailable(f"{MOST_SHAPES} shapes are compiled already")
        # A code object of its own: torch counts recompilations by code object, and past its
        # limit it silently runs uncompiled.
        own = types.FunctionType(_attend.__code__.replace(), _attend.__globals__)
        _functions[shape] = torch.compile(own, dynamic=False)
    return _functions[shape]


def _attend(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)


def _block_mask(lists: KeyLists, heads: slice, q: Tensor, k: Tensor) -> Any:
    """The library's own mask object for some heads, all kept blocks in full."""

    def make() -> Any:
        counts = torch.tensor(lists.counts[heads], dtype=torch.int32)[None]
        # As wide for every mask, or each would be compiled anew.
        indices = F.pad(lists.indices[None, heads], (0, lists.k_blocks - lists.indices.shape[-1]))
        none = torch.zeros_like(counts), torch.zeros_like(indices)
        maker = _library().BlockMask.from_kv_blocks
        wanted = {"seq_lengths": (q.shape[2], k.shape[2]), "compute_q_blocks": False}
        taken = inspect.signature(maker).parameters
        return maker(
            *(t.to(q.device) for t in (*none, counts, indices)),
            BLOCK_SIZE=lists.block,
            **{name: value for name, value in wanted.items() if name in taken},
        )

    return lists.kept(("flex", q.device, heads.start, heads.stop), make)
