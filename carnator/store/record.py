"""What a record is, in memory: what the engine hands over and what the index knows."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor

from .errors import RecordError

FORMAT = 2  # version of the record format; readers refuse any other
SIGNATURE_LIMIT = 1 << 14  # numbers
META_LIMIT = 1 << 20  # characters of JSON
RECORD_ID = re.compile(r"[0-9a-f]{32}")
NAME = re.compile(r"[0-9A-Za-z_.-]{1,128}")  # partition and identity: hex hashes in practice


@dataclass(frozen=True, eq=False)
class Draft:
    """A finished dense run, as the engine hands it over. The store does not copy: leave it alone.

    partition: hash; records of equal partitions may be donors to each other.
    identity: hash of everything incl. soft keys; equal means the same request.
    meta: JSON-able, finite numbers only; ``seconds`` (of the dense run) weighs in eviction.
    tensors: CPU tensors of plain dtypes, finite.
    signature: float16 [K], finite, may be empty.
    encode: makes of them, in the background, the tensors that are stored; None stores them as
        they are.
    """

    partition: str
    identity: str
    meta: dict[str, Any]
    tensors: dict[str, Tensor]
    signature: np.ndarray
    encode: Callable[[], dict[str, Tensor]] | None = None


@dataclass(frozen=True, eq=False)
class Entry:
    """What the index knows without touching the payload. Shared between callers: do not change.

    nbytes: size of the payload file. created: seconds since the epoch.
    """

    id: str
    partition: str
    identity: str
    meta: dict[str, Any]
    signature: np.ndarray
    nbytes: int
    created: float


def dumps(value: Any) -> str:
    """Compact JSON. ValueError for NaN and infinities, TypeError for what JSON has no form for."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def loads(text: str) -> Any:
    """JSON from an untrusted source. RecordError for anything but finite, moderately deep JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"its description is not valid JSON ({error})") from None


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # 1e999 is valid JSON and reads as infinity
        raise ValueError(f"{text} is not a finite number")
    return value


def seal(text: str) -> str:
    """Put a digest in front of a description. Against damage, not against forgery."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() + text


def unseal(sealed: str) -> str:
    """The description behind its digest. RecordError if they do not agree."""
    text = sealed[64:]
    if seal(text) != sealed:
        raise RecordError("its description does not match its checksum")
    return text


def is_record_id(value: Any) -> bool:
    """Whether a value has the form of an id."""
    return isinstance(value, str) and RECORD_ID.fullmatch(value) is not None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value from JSON is a number (True is none)."""
    return type(value) in (int, float)


def pack_entry(entry: Entry) -> bytes:
    """An entry as the bytes of its index row."""
    return seal(dumps(describe(entry))).encode("utf-8")


def unpack_entry(row: bytes, record_id: str) -> Entry:
    """An untrusted index row to the entry of ``record_id``. RecordError."""
    try:
        text = row.decode("utf-8")
    except UnicodeDecodeError:
        raise RecordError("its index row is not text") from None
    entry = parse_entry(loads(unseal(text)))
    if entry.id != record_id:
        raise RecordError(f"its index row is that of record {entry.id}")
    return entry


def describe(entry: Entry) -> dict[str, Any]:
    """An entry as JSON-able data; ``parse_entry`` is the way back."""
    signature = np.ascontiguousarray(entry.signature, dtype="<f2").tobytes()
    return {
        "format": FORMAT,
        "id": entry.id,
        "partition": entry.partition,
        "identity": entry.identity,
        "meta": entry.meta,
        "signature": base64.b64encode(signature).decode("ascii"),
        "nbytes": entry.nbytes,
        "created": entry.created,
    }


def parse_entry(data: Any, nbytes: int | None = None) -> Entry:
    """Untrusted JSON data to an entry; ``nbytes`` overrides the stated size. RecordError."""
    if not isinstance(data, dict):
        raise RecordError("its description is not a JSON object")
    if data.get("format") != FORMAT or type(data["format"]) is not int:
        raise RecordError(f"it has format {data.get('format')!r}, this version reads {FORMAT}")
    size = data.get("nbytes") if nbytes is None else nbytes
    created = data.get("created")
    if type(size) is not int or not 0 <= size < 1 << 62:
        raise RecordError(f"its size {size!r} is not a byte count")
    if not is_number(created) or not 0 <= created < 1 << 40:
        raise RecordError(f"its time {created!r} is not in seconds since 1970")
    if not isinstance(data.get("meta"), dict):
        raise RecordError("its meta is not a JSON object")
    return Entry(
        id=_text(data, "id", RECORD_ID),
        partition=_text(data, "partition", NAME),
        identity=_text(data, "identity", NAME),
        meta=data["meta"],
        signature=_parse_signature(data.get("signature")),
        nbytes=size,
        created=float(created),
    )


def _text(data: dict[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise RecordError(f"its {key} {value!r:.80} has not the expected form")
    return value


def _parse_signature(text: Any) -> np.ndarray:
    """Base64 of little-endian float16 to a read-only float16 [K]."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise RecordError("its signature is not base64") from None
    if len(raw) % 2 or len(raw) // 2 > SIGNATURE_LIMIT:
        raise RecordError(f"its signature of {len(raw)} bytes has not the expected form")
    signature = np.frombuffer(raw, dtype="<f2").astype(np.float16)
    if not np.isfinite(signature).all():
        raise RecordError("its signature holds NaN or infinity")
    signature.flags.writeable = False
    return signature
