"""Records as one plain file, to take them to another machine.

Layout: one line of text that names the format, then for each record 8 bytes little-endian length
and the payload, which is a safetensors file and describes itself, and 8 zero bytes at the end.
A file that is cut off still gives the records before the cut.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .commit import Limits, commit
from .disk import CHUNK, UnsafeRow, open_plain
from .errors import RecordError, StoreError
from .header import Header, read_header, read_tensors
from .index import Index
from .payload import Payload, encode
from .record import FORMAT, Draft

log = logging.getLogger("carnator")

MAGIC = f"carnator records, format {FORMAT}\n".encode("ascii")
RECORD_LIMIT = 1 << 32  # bytes; one record at a time is held in memory

Reading = Callable[[str], AbstractContextManager[tuple[BinaryIO, Header]]]


@dataclass(frozen=True)
class Imported:
    """Records taken in, left out because they (or the same requests) were here, and refused."""

    taken: int
    known: int
    refused: int


def export(path: Path, ids: Iterable[str], reading: Reading) -> int:
    """Write the payloads of records to a new file; returns how many. StoreError if the file is
    there already or cannot be written, RecordError if a record cannot be read."""
    if path.exists():
        raise StoreError(f"{str(path)!r} is already there; choose another name.")
    written = 0
    try:
        with _appearing(path) as out:
            out.write(MAGIC)
            for record_id in ids:
                with reading(record_id) as (stream, header):
                    for name in header.names:
                        read_tensors(stream, header, [name])  # nothing damaged is passed on
                    out.write(header.entry.nbytes.to_bytes(8, "little"))
                    stream.seek(0)
                    while chunk := stream.read(CHUNK):
                        out.write(chunk)
                written += 1
            out.write(bytes(8))
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be written: {error}.") from error
    return written


@contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """A file that stands under its name only once it is complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    complete = False
    try:
        with open(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
        complete = True
    finally:
        if not complete:
            os.unlink(name)


def import_file(path: Path, index: Index, limits: Limits) -> Imported:
    """Take in the records of an untrusted file. No record here is evicted or replaced for one from
    outside. StoreError if the file is none of ours or the room gives out; what was taken stays."""
    try:
        stream = open_plain(path)
    except (OSError, UnsafeRow) as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error}.") from error
    taken = known = refused = 0
    with stream:
        for at, size in _places(stream, path):
            try:
                payload = _payload(stream, at, size)
            except (RecordError, StoreError) as error:
                log.warning("Import: left out a record of %s: %s.", path, error)
                refused += 1
                continue
            entry = payload.entry
            here = index.open().same_request(entry.partition, entry.identity)
            if here or index.entry(entry.id) is not None:
                known += 1
                continue
            commit(index, payload, limits, make_room=False)
            taken += 1
    return Imported(taken, known, refused)


def _places(stream: BinaryIO, path: Path) -> Iterator[tuple[int, int]]:
    """Where each payload begins, and its length. StoreError if the file is none of ours."""
    size = os.fstat(stream.fileno()).st_size
    if stream.read(len(MAGIC)) != MAGIC:
        wanted = MAGIC.decode().strip()
        raise StoreError(f"{str(path)!r} is no file of {wanted!r}: export it with this version.")
    at = len(MAGIC)
    while True:
        stream.seek(at)
        length = int.from_bytes(stream.read(8), "little")
        at += 8
        if length == 0 or length > size - at:
            if length or at > size:
                log.warning("Import: %s is cut off; its last record is left out.", path)
            return
        yield at, length
        at += length


def _payload(stream: BinaryIO, at: int, size: int) -> Payload:
    """A record from a file, checked whole and laid out anew: what is written is what this version
    writes, whatever the file held. RecordError, StoreError."""
    if size > RECORD_LIMIT:
        raise RecordError(f"it takes {size} bytes, more than {RECORD_LIMIT}")
    header = read_header(stream, at, size)
    header.check_spans()
    entry = header.entry
    tensors = read_tensors(stream, header, header.names)
    draft = Draft(entry.partition, entry.identity, entry.meta, tensors, entry.signature)
    return encode(draft, entry.id, min(entry.created, time.time()))
