"""Block-sparse attention by SpargeAttn's fused kernel, where that package is installed.

The kernel (arXiv:2502.18137) quantises queries and keys to 8 bits and takes a mask of 128 x 64
blocks, on devices of compute capability 9.0 of 64 x 128. Nothing here was run on such a device
by this project's tests: every combination of shapes is therefore compared with an exact sample
on first use, and dropped with one line in the log if it is off.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .blocks import KeyLists
from .parts import Unavailable, check, in_parts

PACKAGE, ENTRY = "spas_sage_attn", "block_sparse_sage2_attn_cuda"
TALL, WIDE = 128, 64
HEAD_DIMS = (64, 128)
# The kernel may skip products of weights below a threshold; this one is above all of them.
NEVER_SKIP = 1e6
TOLERANCE = 0.1

_trusted: set[tuple[Any, ...]] = set()
_refused: dict[tuple[Any, ...], str] = {}


@functools.cache
def entry() -> Callable[..., Tensor] | None:
    """The kernel's function, or None where it is not installed or does not load."""
    try:
        return getattr(importlib.import_module(PACKAGE), ENTRY, None)
    except Exception:  # a wheel for another CUDA or torch fails in its own ways
        return None


def available(q: Tensor, k: Tensor, v: Tensor, block: int) -> bool:
    """Whether the kernel is there and made for tensors like these."""
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] in HEAD_DIMS
        and v.shape[-1] == q.shape[-1]
        and k.shape[1] == q.shape[1]
        and k.shape[2] == q.shape[2] >= TALL
        and block % TALL == 0
        and entry() is not None
    )


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, scale: float, order: Tensor | None = None
) -> Tensor:
    """As ``gather.gather_attention``. Raises Unavailable where it cannot be used."""
    kernel = entry()
    if kernel is None or not available(q, k, v, lists.block):
        raise Unavailable("SpargeAttn is not installed, or not made for these tensors")
    shape = (q.device, q.dtype, tuple(q.shape), lists.block, order is None)
    if shape in _refused:
        raise Unavailable(_refused[shape])

    def run(q: Tensor, k: Tensor, v: Tensor, heads: slice) -> Tensor:
        mask = _mask(lists, heads, q)
        made = kernel(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            mask_id=mask.expand(q.shape[0], -1, -1, -1).contiguous(),
            scale=scale,
            pvthreshd=NEVER_SKIP,
            tensor_layout="HND",
        )
        return made.to(q.dtype)

    try:
        out = in_parts(run, q, k, v, order)
        if shape not in _trusted:
            check(out, q, k, v, lists, scale, order, TOLERANCE)
            _trusted.add(shape)
    except Exception as error:
        _refused[shape] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise Unavailable(_refused[shape]) from error
    return out


def _mask(lists: KeyLists, heads: slice, q: Tensor) -> Tensor:
    """int8 [1, heads, rows, columns] in the kernel's own block sizes."""
    swapped = torch.cuda.get_device_capability(q.device) == (9, 0)
    tall, wide = (WIDE, TALL) if swapped else (TALL, WIDE)

    def make() -> Tensor:
        fine = lists.mask[heads].repeat_interleave(lists.block // tall, 1)
        fine = fine.repeat_interleave(lists.block // wide, 2)
        rows, columns = -(-q.shape[2] // tall), -(-q.shape[2] // wide)
        return fine[None, :, :rows, :columns].to(q.device, torch.int8)

    return lists.kept(("fused", q.device, heads.start, heads.stop), make)
