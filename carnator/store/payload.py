"""The payload of a record: one safetensors file.

Its ``__metadata__`` holds one entry, ``carnator``: the sealed description of the record plus a
CRC-32 per tensor, so that the index can be rebuilt from the files. Files are read by seeking to
the slices that are wanted; nothing is mapped, because a mapped file cannot be deleted on Windows
and kills the process when it is truncated underneath.

Layout (the safetensors format): 8 bytes little-endian header length, JSON header, tensor data.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from .errors import RecordError, StoreError
from .record import (
    META_LIMIT,
    NAME,
    SIGNATURE_LIMIT,
    Draft,
    Entry,
    describe,
    dumps,
    loads,
    parse_entry,
    seal,
    unseal,
)

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
    """Where one tensor lies in the file (absolute byte offsets) and what it must sum to."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    crc: int


@dataclass(frozen=True, eq=False)
class Header:
    """A checked header: the record's entry and the place of each tensor."""

    entry: Entry
    spans: dict[str, Span]


class Payload:
    """An encoded record, ready to be streamed to disk without a second copy in memory."""

    def __init__(self, entry: Entry, parts: list[memoryview]) -> None:
        self.entry = entry
        self._parts = [part for part in parts if part.nbytes]

    def read(self, size: int) -> memoryview | bytes:
        """The next at most ``size`` bytes; b"" at the end."""
        if not self._parts:
            return b""
        head, rest = self._parts[0][:size], self._parts[0][size:]
        self._parts[:1] = [rest] if rest.nbytes else []
        return head


def encode(draft: Draft, record_id: str, created: float) -> Payload:
    """Check a draft and lay it out as a safetensors file. StoreError says what is wrong with it."""
    for field in ("partition", "identity"):
        value = getattr(draft, field)
        if not isinstance(value, str) or not NAME.fullmatch(value):
            raise StoreError(f"The record's {field} is {value!r:.80}; a hex hash is expected.")
    signature = _check_signature(draft.signature)
    meta = _check_meta(draft.meta)
    if len(draft.tensors) > TENSOR_LIMIT:
        raise StoreError(
            f"The record has {len(draft.tensors)} tensors; {TENSOR_LIMIT} is the limit."
        )
    tensors = {name: _check_tensor(name, tensor) for name, tensor in draft.tensors.items()}
    header: dict[str, Any] = {}
    sums: dict[str, int] = {}
    parts: list[memoryview] = []
    offset = 0
    # Widest first: every tensor then starts at a multiple of its item size.
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (-item[1].element_size(), item[0])
    ):
        dtype, shape, data = DTYPE_NAMES[tensor.dtype], list(tensor.shape), tensor_bytes(tensor)
        span = [offset, offset + data.nbytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        sums[name] = _crc(name, dtype, shape, data)
        parts.append(data)
        offset = span[1]
    entry = Entry(record_id, draft.partition, draft.identity, meta, signature, 0, created)
    sealed = seal(dumps({**describe(entry), "nbytes": None, "sums": sums}))
    text = dumps({"__metadata__": {META_KEY: sealed}, **header}).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise StoreError(f"The record's description takes {len(text)} bytes; that is too much.")
    parts.insert(0, memoryview(len(text).to_bytes(8, "little") + text))
    return Payload(replace(entry, nbytes=8 + len(text) + offset), parts)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as flat bytes, shared, writable."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_header(stream: BinaryIO) -> Header:
    """Parse and check an untrusted payload's header. RecordError says what is wrong with it."""
    size = os.fstat(stream.fileno()).st_size
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise RecordError(f"its header claims {length} bytes, the file has {size}")
    try:
        header = loads(stream.read(length).decode("utf-8"))
        sealed = header.pop("__metadata__")[META_KEY]
        data = loads(unseal(sealed))
        sums = data["sums"]
    except (UnicodeError, AttributeError, KeyError, TypeError):
        raise RecordError("its header is not one of a Carnator record") from None
    entry = parse_entry(data, nbytes=size)
    if not isinstance(sums, dict) or sums.keys() != header.keys():
        raise RecordError("its tensors and their checksums do not pair up")
    if len(header) > TENSOR_LIMIT:
        raise RecordError(f"it claims {len(header)} tensors")
    base = 8 + length
    spans = {name: _parse_span(name, item, sums[name], base) for name, item in header.items()}
    end = base
    for span in sorted(spans.values(), key=lambda s: (s.start, s.stop)):
        if span.start != end:
            raise RecordError("its tensors overlap or leave gaps")
        end = span.stop
    if end != size:
        raise RecordError(f"its tensors end at byte {end}, the file at {size}")
    return Header(entry, spans)


def read_tensors(stream: BinaryIO, header: Header, names: Sequence[str]) -> dict[str, Tensor]:
    """Read the named tensors and nothing else, each checked. RecordError."""
    tensors: dict[str, Tensor] = {}
    for name in names:
        span = header.spans.get(name)
        if span is None:
            raise RecordError(f"it has no tensor {name!r:.80}")
        tensor = torch.empty(span.shape, dtype=DTYPES[span.dtype])
        data = tensor_bytes(tensor)
        stream.seek(span.start)
        filled = 0
        while filled < data.nbytes:
            count = stream.readinto(data[filled:])  # type: ignore[attr-defined]
            if not count:
                raise RecordError(f"the file ends within tensor {name!r}")
            filled += count
        if _crc(name, span.dtype, list(span.shape), data) != span.crc:
            raise RecordError(f"tensor {name!r} does not match its checksum")
        if not is_finite(tensor):
            raise RecordError(f"tensor {name!r} holds NaN or infinity")
        tensors[name] = tensor
    return tensors


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; integers always are."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _crc(name: str, dtype: str, shape: list[int], data: memoryview) -> int:
    # The label goes into the sum, so that a changed shape or swapped tensors do not pass.
    return zlib.crc32(data, zlib.crc32(dumps([name, dtype, shape]).encode("utf-8")))


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
    return Span(dtype, shape, base + start, base + stop, crc)


_SPAN_KEYS = {"dtype", "shape", "data_offsets"}


def _check_signature(signature: Any) -> np.ndarray:
    signature = np.array(signature, dtype=np.float16)
    if signature.ndim != 1 or signature.size > SIGNATURE_LIMIT:
        raise StoreError(
            f"The signature has shape {signature.shape}; one axis of at most {SIGNATURE_LIMIT} "
            "numbers is expected."
        )
    if not np.isfinite(signature).all():
        raise StoreError("The signature holds NaN or infinity; such a run is not recorded.")
    signature.flags.writeable = False
    return signature


def _check_meta(meta: Any) -> dict[str, Any]:
    """A private copy of ``meta`` exactly as it will come back from JSON."""
    try:
        text = dumps(meta)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"The record's meta cannot be written as JSON: {error}.") from None
    if len(text) > META_LIMIT:
        raise StoreError(f"The record's meta takes {len(text)} characters; cut it down.")
    copy = json.loads(text)
    if not isinstance(copy, dict):
        raise StoreError(f"The record's meta must be a dict, not {type(meta).__name__}.")
    return copy


def _check_tensor(name: Any, tensor: Any) -> Tensor:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT or name == "__metadata__":
        raise StoreError(f"{name!r:.80} cannot name a tensor; use a short text.")
    if not isinstance(tensor, Tensor):
        raise StoreError(f"{name!r} is a {type(tensor).__name__}, not a tensor.")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise StoreError(f"Tensor {name!r} is not a plain CPU tensor; move it there first.")
    if tensor.dtype not in DTYPE_NAMES or tensor.dim() > RANK_LIMIT:
        raise StoreError(
            f"Tensor {name!r} is {tensor.dtype} with {tensor.dim()} axes; encode it as one of "
            f"{', '.join(DTYPES)} with at most {RANK_LIMIT} axes."
        )
    if not is_finite(tensor):
        raise StoreError(f"Tensor {name!r} holds NaN or infinity; such a run is not recorded.")
    return tensor.detach().contiguous()
