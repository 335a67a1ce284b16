"""The payload of a record, read: one safetensors file, taken for what anybody could have made.

Its ``__metadata__`` holds one entry, ``carnator``: the sealed description of the record plus a
CRC-32 per tensor, so that the index can be rebuilt from the files. Files are read by seeking to
the slices that are wanted; nothing is mapped, because a mapped file cannot be deleted on Windows
and kills the process when it is truncated underneath.

Layout (the safetensors format): 8 bytes little-endian header length, JSON header, tensor data.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .errors import RecordError
from .record import Entry, dumps, loads, parse_entry, unseal

META_KEY = "carnator"
HEADER_LIMIT = 1 << 23  # bytes; a real header has a few ten thousand
TENSOR_LIMIT = 1 << 14
NAME_LIMIT = 200
RANK_LIMIT = 8
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Span:
    """Where one tensor lies in the file (absolute byte offsets) and what it must sum to; ``label``
    is the sum of name, dtype and shape, with which that of its bytes begins."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    crc: int
    label: int


class Header:
    """A record's entry and the places of its tensors, each checked when it is asked for."""

    def __init__(
        self, entry: Entry, items: dict[str, Any], sums: dict[str, Any], base: int
    ) -> None:
        self.entry = entry
        self._items, self._sums, self._base = items, sums, base
        self._spans: dict[str, Span] = {}

    @property
    def names(self) -> list[str]:
        return list(self._items)

    def span(self, name: str) -> Span:
        """The place of a tensor. RecordError if there is none or it makes no sense."""
        if name not in self._items:
            raise RecordError(f"it has no tensor {name!r:.80}")
        if name not in self._spans:
            item, crc = self._items[name], self._sums[name]
            self._spans[name] = _parse_span(name, item, crc, self._base)
        return self._spans[name]

    def check_spans(self) -> None:
        """Check all of them. RecordError."""
        for name in self._items:
            self.span(name)


def read_header(stream: BinaryIO, at: int = 0, size: int | None = None) -> Header:
    """Parse and check an untrusted payload's header. RecordError says what is wrong with it.

    The payload is the whole file, or the ``size`` bytes from ``at`` of one that holds several.
    """
    if size is None:
        size = os.fstat(stream.fileno()).st_size
    stream.seek(at)
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise RecordError(f"its header claims {length} bytes, the file has {size}")
    try:
        items = loads(stream.read(length).decode("utf-8"))
        sealed = items.pop("__metadata__")[META_KEY]
        data = loads(unseal(sealed))
        sums = data["sums"]
    except (UnicodeError, AttributeError, KeyError, TypeError):
        raise RecordError("its header is not one of a Carnator record") from None
    entry = parse_entry(data, nbytes=size)
    if not isinstance(sums, dict) or sums.keys() != items.keys():
        raise RecordError("its tensors and their checksums do not pair up")
    if len(items) > TENSOR_LIMIT:
        raise RecordError(f"it claims {len(items)} tensors")
    _check_layout(items, size - 8 - length)
    return Header(entry, items, sums, at + 8 + length)


def read_tensors(stream: BinaryIO, header: Header, names: Sequence[str]) -> dict[str, Tensor]:
    """Read the named tensors and nothing else, each checked. RecordError."""
    tensors: dict[str, Tensor] = {}
    for name in names:
        span = header.span(name)
        tensor = torch.empty(span.shape, dtype=DTYPES[span.dtype])
        data = tensor_bytes(tensor)
        stream.seek(span.start)
        filled = 0
        while filled < data.nbytes:
            count = stream.readinto(data[filled:])  # type: ignore[attr-defined]
            if not count:
                raise RecordError(f"the file ends within tensor {name!r}")
            filled += count
        if zlib.crc32(data, span.label) != span.crc:
            raise RecordError(f"tensor {name!r} does not match its checksum")
        if not is_finite(tensor):
            raise RecordError(f"tensor {name!r} holds NaN or infinity")
        tensors[name] = tensor
    return tensors


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as flat bytes, shared, writable."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; integers always are."""
    if not tensor.is_floating_point():
        return True
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    # One sum is many times faster than a look at each, which only an overflow makes necessary.
    if math.isfinite(float(tensor.sum(dtype=wide))):
        return True
    return bool(torch.isfinite(tensor).all())


def checksum(name: str, dtype: str, shape: list[int], data: memoryview) -> int:
    """CRC-32 of a tensor's label and bytes."""
    return zlib.crc32(data, _label(name, dtype, shape))


def _label(name: str, dtype: str, shape: list[int]) -> int:
    # The label goes into the sum, so that a changed shape or swapped tensors do not pass.
    return zlib.crc32(dumps([name, dtype, shape]).encode("utf-8"))


def _check_layout(items: dict[str, Any], nbytes: int) -> None:
    """The tensors must follow each other without gaps and fill ``nbytes``."""
    places = []
    for name, item in items.items():
        try:
            start, stop = item["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise RecordError(f"tensor {name!r:.80} is not described as expected") from None
        if type(start) is not int or type(stop) is not int:
            raise RecordError(f"tensor {name!r:.80} is not described as expected")
        places.append((start, stop))
    end = 0
    for start, stop in sorted(places):
        if start != end or stop < start:
            raise RecordError("its tensors overlap or leave gaps")
        end = stop
    if end != nbytes:
        raise RecordError(f"its tensors end at byte {end}, the file at {nbytes}")


def _parse_span(name: str, item: Any, crc: Any, base: int) -> Span:
    try:
        dtype, shape, (start, stop) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        plain = {type(n) for n in (*shape, start, stop, crc)} == {int}
        known = isinstance(dtype, str) and dtype in DTYPES and item.keys() == _SPAN_KEYS
    except (AttributeError, KeyError, TypeError, ValueError):
        raise RecordError(f"tensor {name!r:.80} is not described as expected") from None
    if not known or not plain or len(name) > NAME_LIMIT or len(shape) > RANK_LIMIT:
        raise RecordError(f"tensor {name!r:.80} is not described as expected")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    volume = math.prod(max(n, 1) for n in shape)  # an empty tensor can still have absurd strides
    if min((0, start, *shape)) < 0 or stop - start != size or volume >> 48:
        raise RecordError(f"tensor {name!r} of shape {shape!r:.80} does not fit its place")
    label = _label(name, dtype, list(shape))
    return Span(dtype, shape, base + start, base + stop, crc, label)


_SPAN_KEYS = {"dtype", "shape", "data_offsets"}
