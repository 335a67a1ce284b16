"""What operations over all records need of each: small, packed, quick to read by the thousand."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np

from .errors import RecordError
from .record import NAME, SIGNATURE_LIMIT, Entry, is_number, pack_entry

# Version, length of the identity, numbers in the signature; size, time, seconds.
_HEAD = struct.Struct("<BBHqdd")
_SUM = struct.Struct("<I")
VERSION = 1
DEFAULT_SECONDS = 1.0
MOST_SECONDS = 86400.0  # a record that claims more must not outlive all others


@dataclass(frozen=True, eq=False)
class Brief:
    """The part of an entry that eviction and matching weigh. ``nbytes``: what the record takes, its
    payload and its index rows; ``seconds``: of its dense run."""

    id: str
    identity: str
    nbytes: int
    created: float
    seconds: float
    signature: np.ndarray


def brief_of(entry: Entry) -> Brief:
    """The brief of an entry; its seconds are held to a range, whatever the record claims."""
    seconds = entry.meta.get("seconds")
    if not is_number(seconds) or not 0 < seconds < 1e12:
        seconds = DEFAULT_SECONDS
    seconds = min(float(seconds), MOST_SECONDS)
    own = _HEAD.size + len(entry.identity) + 2 * entry.signature.size + _SUM.size
    nbytes = entry.nbytes + len(pack_entry(entry)) + own
    return Brief(entry.id, entry.identity, nbytes, entry.created, seconds, entry.signature)


def pack_brief(brief: Brief) -> bytes:
    """A brief as the bytes of its index row."""
    identity = brief.identity.encode("ascii")
    signature = np.ascontiguousarray(brief.signature, dtype="<f2").tobytes()
    head = _HEAD.pack(
        VERSION, len(identity), len(signature) // 2, brief.nbytes, brief.created, brief.seconds
    )
    data = head + identity + signature
    return data + _SUM.pack(zlib.crc32(data))


def unpack_brief(row: bytes, record_id: str) -> Brief:
    """An untrusted index row to the brief of ``record_id``. RecordError."""
    if len(row) < _HEAD.size + _SUM.size:
        raise RecordError("its brief is too short")
    version, length, numbers, nbytes, created, seconds = _HEAD.unpack_from(row)
    start = _HEAD.size + length
    end = start + 2 * numbers
    if version != VERSION or end + _SUM.size != len(row) or numbers > SIGNATURE_LIMIT:
        raise RecordError("its brief has not the expected form")
    if zlib.crc32(row[:end]) != _SUM.unpack_from(row, end)[0]:
        raise RecordError("its brief does not match its checksum")
    identity = row[_HEAD.size : start].decode("ascii", "replace")
    times = math.isfinite(created) and 0 < seconds <= MOST_SECONDS
    if not NAME.fullmatch(identity) or not times or nbytes < 0:
        raise RecordError("its brief has not the expected form")
    signature = np.frombuffer(row, "<f2", numbers, start)
    if not np.isfinite(signature).all():
        raise RecordError("the signature in its brief holds NaN or infinity")
    return Brief(record_id, identity, nbytes, created, seconds, signature)
