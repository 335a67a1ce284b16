"""Reading records: the payload found, its header parsed once, and what is bad dropped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from .database import TROUBLE
from .disk import UnsafeRow
from .errors import RecordError, StoreError
from .header import Header, read_header
from .index import Index
from .memory import Kept
from .record import is_record_id

HEADERS_KEPT = 64  # parsed headers in memory


@dataclass(frozen=True)
class _Place:
    """Where a record's payload was found, and its header as long as that file stays the same."""

    filename: str
    state: tuple[int, int, int]
    header: Header


class Reader:
    """Opens the payloads of an index. Any thread may call any method."""

    def __init__(self, index: Index, trouble: Callable[[str, Exception], None]) -> None:
        """``trouble`` is told what could not be done for a passing reason, and why."""
        self._index, self._trouble = index, trouble
        self._places: Kept[_Place] = Kept(HEADERS_KEPT)

    def relax(self) -> None:
        """Give back the memory of what can be read again."""
        self._places.clear()

    @contextmanager
    def reading(self, id: str) -> Iterator[tuple[BinaryIO, Header]]:
        """An open payload and its header, both to be used within. What is found wrong with the
        record there (RecordError) drops it. RecordError alone."""
        if not is_record_id(id):
            raise RecordError(f"{id!r:.80} is not the id of a record.")
        try:
            stream, header = self._find(id)
            with stream:
                yield stream, header
            return
        except KeyError:
            raise RecordError(f"Record {id} is no longer in the store.") from None
        except FileNotFoundError:
            reason = "its payload file is gone"
        except (RecordError, UnsafeRow) as error:
            reason = str(error)
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot be read", error)
            raise RecordError(f"Record {id} cannot be read just now: {error}") from error
        self._places.drop(id)
        self._index.drop(id, reason)
        raise RecordError(f"Record {id} was dropped: {reason}.")

    def _find(self, id: str) -> tuple[BinaryIO, Header]:
        """Open a payload where it was last found, or where the index says it is."""
        cache, known = self._index.open(), self._places.get(id)
        filename = cache.payload_name(id) if known is None else known.filename
        try:
            stream = cache.open_payload(filename)
        except FileNotFoundError:
            self._places.drop(id)
            if known is None and self._index.open().small(f"entry:{id}") is not None:
                raise
            if known is None:
                raise KeyError(id) from None  # deleted in between
            return self._find(id)
        try:
            return stream, self._header(id, filename, known, stream)
        except BaseException:
            stream.close()
            raise

    def _header(self, id: str, filename: str, known: _Place | None, stream: BinaryIO) -> Header:
        """The checked header of a record; parsed once as long as its file stays the same."""
        status = os.fstat(stream.fileno())
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        if known is not None and known.state == state:
            return known.header
        header = read_header(stream)
        if header.entry.id != id:
            raise RecordError(f"its file is that of record {header.entry.id}")
        self._places.keep(id, _Place(filename, state, header))
        return header
