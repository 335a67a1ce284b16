"""The payload of a record, written: a checked draft laid out as one safetensors file.

``header.py`` reads it and says what it holds.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, strided

from .errors import StoreError
from .header import (
    DTYPE_NAMES,
    DTYPES,
    HEADER_LIMIT,
    META_KEY,
    NAME_LIMIT,
    RANK_LIMIT,
    TENSOR_LIMIT,
    checksum,
    is_finite,
    tensor_bytes,
)
from .record import META_LIMIT, NAME, SIGNATURE_LIMIT, Draft, Entry, describe, dumps, seal


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
        sums[name] = checksum(name, dtype, shape, data)
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
    if tensor.device.type != "cpu" or tensor.layout is not strided:
        raise StoreError(f"Tensor {name!r} is not a plain CPU tensor; move it there first.")
    if tensor.dtype not in DTYPE_NAMES or tensor.dim() > RANK_LIMIT:
        raise StoreError(
            f"Tensor {name!r} is {tensor.dtype} with {tensor.dim()} axes; encode it as one of "
            f"{', '.join(DTYPES)} with at most {RANK_LIMIT} axes."
        )
    if not is_finite(tensor):
        raise StoreError(f"Tensor {name!r} holds NaN or infinity; such a run is not recorded.")
    return tensor.detach().contiguous()
