"""Templates: masks to expect of a backbone before anything is known of the request.

A template is what masks are packed against, what they are compared with, and what stands in for
a donor's masks. The static one follows from the geometry alone; a measured one is the majority
of earlier runs' masks.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .layout import FRAME_WEIGHT, Layout

if TYPE_CHECKING:
    from .pack import Layer, Packed

DENSITY = 0.25


class Template(Protocol):
    """Masks of every layer at every anchor; ``digest`` (16 bytes) tells templates apart."""

    digest: bytes

    def layer(self, anchor: int, number: int) -> Tensor:
        """Masks bool [H, blocks, blocks] to expect of a layer."""
        ...

    def nearest(self, sigma: float) -> int:
        """The anchor to ask for at a noise level."""
        ...


class Static:
    """The same mask for all heads: for each block the nearest blocks in space and time.

    Attention of video transformers decays with that distance (arXiv:2506.19852).
    """

    def __init__(self, layout: Layout, heads: int, density: float = DENSITY):
        self.mask = nearest(layout, density)
        self.heads = heads
        said = repr((layout.grid, layout.before, layout.after, layout.block, heads, density))
        self.digest = hashlib.blake2b(said.encode(), digest_size=16).digest()

    def layer(self, anchor: int, number: int) -> Tensor:
        del anchor, number
        return self.mask.expand(self.heads, -1, -1)

    def nearest(self, sigma: float) -> int:
        del sigma
        return 0


class Measured:
    """The masks of a packed record as a template; another template where they have none."""

    def __init__(self, packed: Packed):
        self.packed = packed
        self.digest = hashlib.blake2b(packed.data, digest_size=16).digest()
        self.layer = functools.lru_cache(maxsize=4)(self._layer)

    def _layer(self, anchor: int, number: int) -> Tensor:
        anchor = min(anchor, len(self.packed.sigmas) - 1)
        found = self.packed.layer(anchor, number)
        base = self.packed.template.layer(anchor, number)
        return base if found is None else torch.where(_per_head(found.sparse), found.mask, base)

    def nearest(self, sigma: float) -> int:
        return self.packed.nearest(sigma)


class Shared:
    """What most of several records' masks have in common; where most have none, the template they
    are packed against. The anchors are those of the first record."""

    def __init__(self, records: Sequence[Packed]):
        self.records = list(records)
        joined = b"".join(hashlib.blake2b(r.data).digest() for r in self.records)
        self.digest = hashlib.blake2b(joined, digest_size=16).digest()
        self.layer = functools.lru_cache(maxsize=4)(self._layer)

    def _layer(self, anchor: int, number: int) -> Tensor:
        first = self.records[0]
        sigma = first.sigmas[min(anchor, len(first.sigmas) - 1)]
        found = majority([r.layer(r.nearest(sigma), number) for r in self.records])
        base = first.template.layer(anchor, number)
        return base if found is None else torch.where(_per_head(found.sparse), found.mask, base)

    def nearest(self, sigma: float) -> int:
        return self.records[0].nearest(sigma)


def nearest(layout: Layout, density: float) -> Tensor:
    """Bool [blocks, blocks]: per row the nearest blocks up to a share ``density`` of all, and
    what the layout always keeps."""
    place = layout.centres * torch.tensor([FRAME_WEIGHT, 1.0, 1.0])
    far = torch.cdist(place, place).masked_fill(layout.always, -1.0)
    count = min(layout.blocks, max(1, round(density * layout.blocks)))
    mask = layout.always.clone()
    return mask.scatter_(-1, far.topk(count, -1, largest=False).indices, True)


def majority(layers: list[Layer | None]) -> Layer | None:
    """One layer's masks that at least half of several runs share; None when most of them have
    none. A head is sparse when it is in at least half of the runs."""
    from .pack import Layer

    there = [layer for layer in layers if layer is not None]
    if 2 * len(there) < len(layers) or not there:
        return None
    votes = torch.stack([layer.sparse for layer in there]).sum(0)
    masks = torch.stack([layer.mask & _per_head(layer.sparse) for layer in there]).sum(0)
    sparse = 2 * votes >= len(layers)
    return Layer(2 * masks >= _per_head(votes.clamp_min(1)), sparse)


def _per_head(values: Tensor) -> Tensor:
    return values[:, None, None]
