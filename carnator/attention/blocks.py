"""Block masks: which blocks of keys each block of queries attends to, in the forms kernels need.

A mask is bool [H, Q, K] over query and key blocks. Packed, it is uint8 [H, Q, ceil(K / 8)], the
first block in the highest bit (as ``numpy.packbits`` lays them out).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BITS = (7, 6, 5, 4, 3, 2, 1, 0)


def block_count(tokens: int, block: int) -> int:
    """Blocks that hold ``tokens``; the last one may be partly filled."""
    return -(-tokens // block)


def pack_bits(mask: Tensor) -> Tensor:
    """Bool [..., K] to uint8 [..., ceil(K / 8)]; spare bits are 0."""
    spare = -mask.shape[-1] % 8
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, spare)).unflatten(-1, (-1, 8))
    weights = torch.tensor([1 << bit for bit in BITS], dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, columns: int) -> Tensor:
    """uint8 [..., ceil(columns / 8)] to bool [..., columns]."""
    shifts = torch.tensor(BITS, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).flatten(-2)[..., :columns].bool()


def expand(mask: Tensor, block: int, queries: int, keys: int) -> Tensor:
    """The mask over tokens, bool [H, queries, keys]; for references, it is large."""
    rows = torch.arange(queries, device=mask.device) // block
    columns = torch.arange(keys, device=mask.device) // block
    return mask[:, rows[:, None], columns]


class KeyLists:
    """A block mask with its lists of key blocks, made once and used by many calls.

    Args:
        mask: bool [H, Q, K], or packed.
        block: tokens per block, of queries and keys alike.
        keys: key blocks K; only needed with a packed mask.

    Raises ValueError for a mask of another kind, or when a block of queries has no key block at
    all: its attention would be undefined.
    """

    def __init__(self, mask: Tensor, block: int, keys: int | None = None):
        if block < 1:
            raise ValueError(f"The block size is {block}; give 1 or more tokens.")
        if mask.dtype == torch.uint8 and mask.ndim == 3 and keys is not None:
            if mask.shape[-1] != -(-keys // 8):
                raise ValueError(
                    f"A packed mask of {keys} key blocks has {-(-keys // 8)} bytes a row, this "
                    f"one has {mask.shape[-1]}; pack it with pack_bits."
                )
            mask = unpack_bits(mask, keys)
        if mask.dtype != torch.bool or mask.ndim != 3:
            raise ValueError(
                f"The block mask is {mask.dtype} {tuple(mask.shape)}; bool [heads, query blocks, "
                "key blocks] or its packed form is expected."
            )
        mask = mask.detach().cpu()
        counts = mask.sum(-1)
        if mask.numel() == 0 or not bool((counts > 0).all()):
            raise ValueError(
                "The block mask leaves a block of queries without any key; keep at least its own."
            )
        self.mask, self.block = mask, block
        self.heads, self.q_blocks, self.k_blocks = mask.shape
        self.counts: list[list[int]] = counts.tolist()
        self.density = float(mask.float().mean())
        # int32 [H, Q, most kept]: a row's kept blocks, ascending, and then zeros. A sort would
        # take seconds for a backbone of forty heads and six hundred blocks.
        self.indices = torch.zeros(*mask.shape[:2], int(counts.max()), dtype=torch.int32)
        for indices, own, count in zip(self.indices, mask, counts):
            row, key = own.nonzero(as_tuple=True)
            before = count.cumsum(0) - count
            indices[row, torch.arange(len(row)) - before[row]] = key.to(torch.int32)
        self.full = [min(row) == self.k_blocks for row in self.counts]
        self._kept: dict[tuple[object, ...], Any] = {}

    def rows(self, head: int) -> list[Tensor]:
        """For each block of queries its key blocks, int32, ascending."""
        counts = self.counts[head]
        return self.kept(
            ("rows", head),
            lambda: [row[:n] for row, n in zip(self.indices[head].unbind(), counts)],
        )

    def kept(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """A back end's own form of the mask; ``make()`` is called the first time."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]
