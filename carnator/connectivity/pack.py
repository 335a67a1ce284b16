"""Packed masks: those of all layers of a run at a few noise levels, as bytes.

Masks are stored as bitmaps, XOR against a template or against the same layer at the noise level
before, whichever leaves less, and each layer is compressed for itself, so that it can be read for
itself. What is read is untrusted: it must be of the geometry that the reader expects, and no
layer is unpacked beyond the size that follows from it.

Layout, little-endian: magic; anchors, layers, heads (u16 each), block and blocks, grid, text tokens
before and after (u32 each); 16 bytes of the template's digest; the anchors' sigmas (f32); the
byte length of each layer's part (u32, anchor by anchor; 0: all heads dense); the parts. A part,
once inflated: a base (0 template, 1 anchor before), a bit per head that is sparse, then the
bitmaps of those heads.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .layout import Layout
from .template import Template

MAGIC = b"CBM1"
HEAD = struct.Struct("<4s3H2I3I2I16s")
ANCHOR_LIMIT, LAYER_LIMIT, HEAD_LIMIT, BLOCK_LIMIT = 16, 512, 512, 8192
BYTES_LIMIT = 1 << 30
LEVEL = 6
TEMPLATE, BEFORE = 0, 1


class MaskError(ValueError):
    """Packed masks that cannot be used: damaged, or of something else."""


@dataclass(frozen=True)
class Geometry:
    """What packed masks must fit: the attention of one backbone at one size."""

    layers: int
    heads: int
    block: int
    blocks: int
    grid: tuple[int, int, int]
    before: int
    after: int

    @classmethod
    def of(cls, layout: Layout, layers: int, heads: int) -> Geometry:
        text = (layout.before, layout.after)
        return cls(layers, heads, layout.block, layout.blocks, layout.grid, *text)

    @property
    def row(self) -> int:
        """Bytes of one row of a bitmap."""
        return -(-self.blocks // 8)

    @property
    def flags(self) -> int:
        """Bytes of one bit per head."""
        return -(-self.heads // 8)


@dataclass(frozen=True, eq=False)
class Layer:
    """Masks bool [H, blocks, blocks] of one layer and which heads [H] have one; the mask of a
    head that has none is not to be used."""

    mask: Tensor
    sparse: Tensor


def pack(
    masks: Sequence[Sequence[Layer | None]],
    sigmas: Sequence[float],
    geometry: Geometry,
    template: Template,
) -> bytes:
    """Masks of [anchor][layer], None for a layer that stays dense, as bytes.

    Raises ValueError for masks that do not fit the geometry.
    """
    g = geometry
    if len(masks) != len(sigmas) or not 0 < len(masks) <= ANCHOR_LIMIT:
        raise ValueError(
            f"There are masks for {len(masks)} noise levels and {len(sigmas)} sigmas; give one "
            f"each, at most {ANCHOR_LIMIT}."
        )
    parts: list[bytes] = []
    for anchor, layers in enumerate(masks):
        if len(layers) != g.layers:
            raise ValueError(f"There are masks for {len(layers)} layers of {g.layers}.")
        for number, layer in enumerate(layers):
            before = masks[anchor - 1][number] if anchor else None
            parts.append(_pack_layer(layer, before, template.layer(anchor, number), g))
    head = HEAD.pack(
        MAGIC, len(masks), g.layers, g.heads, g.block, g.blocks, *g.grid, g.before, g.after,
        template.digest,
    )  # fmt: skip
    levels = np.asarray(sigmas, dtype="<f4").tobytes()
    lengths = np.asarray([len(part) for part in parts], dtype="<u4").tobytes()
    return b"".join([head, levels, lengths, *parts])


def _pack_layer(layer: Layer | None, before: Layer | None, base: Tensor, g: Geometry) -> bytes:
    if layer is None or not bool(layer.sparse.any()):
        return b""
    shape = (g.heads, g.blocks, g.blocks)
    if tuple(layer.mask.shape) != shape or len(layer.sparse) != g.heads:
        raise ValueError(f"A layer's mask is {tuple(layer.mask.shape)}; {shape} is expected.")
    flags = np.packbits(layer.sparse.numpy()).tobytes()
    bases = [(TEMPLATE, base)]
    if before is not None and bool(before.sparse.any()):
        bases.append((BEFORE, _based(before, base)))
    made = []
    for kind, under in bases:
        rest = (layer.mask ^ under)[layer.sparse].numpy()
        made.append(
            zlib.compress(bytes([kind]) + flags + np.packbits(rest, axis=-1).tobytes(), LEVEL)
        )
    return min(made, key=len)


def _based(before: Layer, base: Tensor) -> Tensor:
    """A layer's mask as a base for the next anchor: the template where it has none."""
    return torch.where(before.sparse[:, None, None], before.mask, base)


class Packed:
    """Packed masks, read layer by layer.

    Raises MaskError, here or while reading, for data that is damaged, of another geometry or
    of another template.
    """

    def __init__(self, data: bytes, geometry: Geometry, template: Template):
        if len(data) < HEAD.size:
            raise MaskError(f"The masks are {len(data)} bytes, less than their own header.")
        magic, anchors, layers, heads, block, blocks, *rest, digest = HEAD.unpack_from(data)
        if magic != MAGIC:
            raise MaskError("These bytes are not packed masks.")
        found = Geometry(layers, heads, block, blocks, tuple(rest[:3]), *rest[3:])
        if found != geometry or not 0 < anchors <= ANCHOR_LIMIT:
            raise MaskError(f"The masks are of {found}, not of {geometry}.")
        if digest != template.digest:
            raise MaskError("The masks were packed against another template.")
        if layers > LAYER_LIMIT or heads > HEAD_LIMIT or blocks > BLOCK_LIMIT:
            raise MaskError(f"Masks of {geometry} are too large to be read.")
        count = anchors * layers
        start = HEAD.size + 4 * anchors + 4 * count
        if len(data) < start or len(data) > BYTES_LIMIT:
            raise MaskError(f"The masks are {len(data)} bytes, which no such masks can be.")
        sigmas = np.frombuffer(data, "<f4", anchors, HEAD.size).astype(float)
        if not np.isfinite(sigmas).all() or (np.diff(sigmas) >= 0).any() or sigmas[-1] < 0:
            raise MaskError(f"The masks are of noise levels {sigmas.tolist()}, which do not fall.")
        lengths = np.frombuffer(data, "<u4", count, HEAD.size + 4 * anchors).astype(np.int64)
        ends = start + np.cumsum(lengths)
        if int(ends[-1]) != len(data):
            raise MaskError(f"The masks say they end at byte {ends[-1]}, not at {len(data)}.")
        self.data, self.geometry, self.template = data, geometry, template
        self.sigmas: list[float] = sigmas.tolist()
        self._spans = list(zip((ends - lengths).tolist(), ends.tolist()))

    def nearest(self, sigma: float) -> int:
        """The anchor whose noise level is nearest."""
        return min(range(len(self.sigmas)), key=lambda i: abs(self.sigmas[i] - sigma))

    def layer(self, anchor: int, number: int) -> Layer | None:
        """One layer's masks, or None when all its heads stay dense."""
        g = self.geometry
        start, end = self._spans[anchor * g.layers + number]
        if start == end:
            return None
        kind, sparse, bitmaps = _inflated(self.data[start:end], g)
        base = self.template.layer(anchor, number)
        if kind == BEFORE:
            before = self.layer(anchor - 1, number) if anchor else None
            if before is None:
                raise MaskError("A layer's masks are based on masks that are not there.")
            base = _based(before, base)
        mask = base.clone()
        rest = np.unpackbits(bitmaps, axis=-1, count=g.blocks).astype(bool)
        mask[sparse] ^= torch.from_numpy(rest)
        return Layer(mask, sparse)


def _inflated(part: bytes, g: Geometry) -> tuple[int, Tensor, np.ndarray]:
    """A part's base, the heads [H] that are sparse, and bitmaps uint8 [sparse heads, blocks,
    row]."""
    most = 1 + g.flags + g.heads * g.blocks * g.row
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(part, most + 1)
    except zlib.error as error:
        raise MaskError(f"A layer's masks are damaged ({error}).") from None
    if not inflater.eof or inflater.unused_data or len(raw) < 1 + g.flags:
        raise MaskError("A layer's masks are cut off, or hold more than masks.")
    bits = np.unpackbits(np.frombuffer(raw, np.uint8, g.flags, 1))
    count = int(bits[: g.heads].sum())
    size = 1 + g.flags + count * g.blocks * g.row
    if raw[0] not in (TEMPLATE, BEFORE) or bits[g.heads :].any() or len(raw) != size or not count:
        raise MaskError("A layer's masks do not have the size that they say.")
    bitmaps = np.frombuffer(raw, np.uint8, offset=1 + g.flags).reshape(count, g.blocks, g.row)
    return raw[0], torch.from_numpy(bits[: g.heads].astype(bool)), bitmaps
