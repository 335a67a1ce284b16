"""The store: records of dense runs in one folder, shared by threads and processes.

A generation never fails because of the store: ``submit``, ``entries``, ``note_hit``, ``stats`` and
``delete`` log trouble and go on, ``read`` raises RecordError alone.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from .database import TROUBLE
from .disk import UnsafeRow
from .errors import RecordError, StoreError
from .folder import resolve
from .index import Index
from .payload import Header, encode, read_header, read_tensors
from .record import Draft, Entry, is_record_id
from .writer import Writer

DEFAULT_SIZE = 8 * 2**30
PENDING_LIMIT = 2**30  # bytes of records waiting to be written
HEADERS_KEPT = 64  # parsed headers in memory
ORPHAN_AGE = 3600.0  # seconds after which a payload file without a row is no write in progress


@dataclass(frozen=True)
class StoreStats:
    """Totals. ``bytes``: payload files and index rows; ``hits`` and ``seconds_saved``: ever."""

    folder: Path
    records: int
    bytes: int
    size_limit: int
    hits: int
    seconds_saved: float


class Store:
    """Records of dense runs under a byte limit. Safe to use from several threads and processes."""

    _shared: dict[str, Store] = {}
    _shared_lock = threading.Lock()

    def __init__(self, folder: Path | str, size_limit: int = DEFAULT_SIZE) -> None:
        """``size_limit`` in bytes. StoreError if the folder cannot be written."""
        self.folder = resolve(folder)
        self.size_limit = size_limit
        self._index = Index(self.folder)
        self._writer = Writer(PENDING_LIMIT)
        self._swept = False
        self._headers: dict[str, tuple[tuple[int, int, int], Header]] = {}

    @classmethod
    def open(cls, folder: Path | str, size_limit: int = DEFAULT_SIZE) -> Store:
        """The one instance of this process for a folder; the latest ``size_limit`` holds."""
        key = os.path.normcase(resolve(folder))
        with cls._shared_lock:
            store = cls._shared.get(key)
            if store is None or store._index.closed:
                store = cls._shared[key] = cls(folder, size_limit)
            store.size_limit = size_limit
            return store

    @property
    def size_limit(self) -> int:
        """Bytes the store may take; exceeded at most by the record being written."""
        return self._size_limit

    @size_limit.setter
    def size_limit(self, limit: int) -> None:
        if type(limit) is not int or limit <= 0:
            raise StoreError(
                f"The store's size limit is {limit!r}; give a number of bytes above 0."
            )
        self._size_limit = limit

    def put(self, draft: Draft) -> str:
        """Check and write a record, return its id. It is visible once it is completely written.

        An older record of the same request is replaced; the least valuable ones make room.
        StoreError if the draft is refused or cannot be written.
        """
        payload = encode(draft, uuid.uuid4().hex, time.time())
        entry = payload.entry
        if entry.nbytes > self.size_limit:
            raise StoreError(
                f"The record takes {entry.nbytes} bytes, the store's limit is {self.size_limit}; "
                "raise the limit."
            )
        try:
            self._index.commit(payload)
            self._index.evict(self.size_limit, protect=entry.id)
        except TROUBLE as error:
            self._index.heal(error)
            raise StoreError(f"The record cannot be written to {self.folder}: {error}.") from error
        return entry.id

    def submit(self, draft: Draft) -> None:
        """Have ``put`` done in the background. Never raises; what goes wrong is logged."""
        try:
            nbytes = sum(t.numel() * t.element_size() for t in draft.tensors.values())
            if not self._writer.add(partial(self._put_quietly, draft), nbytes):
                self._index.say("Store %s is busy writing; a run was not recorded.", self.folder)
            if not self._swept:
                self._swept = True
                self._writer.add(self._sweep)
        except Exception as error:  # whatever a draft may hold: the generation goes on
            self._index.say("Store %s: a run was not recorded: %s", self.folder, error)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for what is pending in the background; False if ``timeout`` seconds passed first."""
        return self._writer.flush(timeout)

    def entries(self, partition: str | None = None) -> list[Entry]:
        """All records, or those of a partition, newest first. A damaged index row is dropped."""
        try:
            return self._index.entries(partition)
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot be listed", error)
            return []

    def read(self, id: str, names: Sequence[str]) -> dict[str, Tensor]:
        """The named tensors of a record, read alone and checked. RecordError."""
        if not is_record_id(id):
            raise RecordError(f"{id!r:.80} is not the id of a record.")
        try:
            with self._index.open().open_payload(id) as stream:
                return read_tensors(stream, self._header(id, stream), names)
        except (KeyError, FileNotFoundError):
            reason = "it is no longer in the store"
        except (RecordError, UnsafeRow) as error:
            reason = str(error)
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot be read", error)
            raise RecordError(f"Record {id} cannot be read just now: {error}") from error
        self._index.drop(id, reason)
        raise RecordError(f"Record {id} was dropped: {reason}.")

    def note_hit(self, id: str, seconds_saved: float) -> None:
        """Count a hit and the seconds it saved (0 to 1e9), in the background. Never raises."""
        seconds = float(seconds_saved) if 0 <= seconds_saved < 1e9 else 0.0  # NaN counts as 0
        self._writer.add(
            partial(self._quietly, "cannot count a hit", self._index.count_hit, id, seconds)
        )

    def claim(self, name: str, owner: str) -> str:
        """Take a name for ``owner`` (both short ASCII) unless somebody holds it; returns the
        holder, or ``owner`` if the store cannot be asked. Kept for half a year. Never raises."""
        try:
            return self._index.claim(name, owner)
        except (StoreError, UnsafeRow, *TROUBLE) as error:
            self._trouble("cannot keep a claim", error)
            return owner

    def delete(self, id: str) -> bool:
        """Delete a record; False if there was none or it cannot be deleted (logged)."""
        try:
            return is_record_id(id) and self._index.erase(id)
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot delete a record", error)
            return False

    def clear(self) -> None:
        """Delete everything, also what waits to be written. StoreError if that fails."""
        self._writer.discard()
        self._writer.flush()
        try:
            self._index.clear()
        except TROUBLE as error:
            self._index.heal(error)
            raise StoreError(f"The store {self.folder} cannot be cleared: {error}.") from error

    def stats(self) -> StoreStats:
        """Totals; zeros if the store cannot be read (logged)."""
        try:
            records, size, use = self._index.totals()
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot be read", error)
            return StoreStats(self.folder, 0, 0, self.size_limit, 0, 0.0)
        limit = self.size_limit
        return StoreStats(self.folder, records, size, limit, use.hits, use.seconds_saved)

    def rebuild(self, min_age: float = ORPHAN_AGE) -> int:
        """Index payload files that lack a row, delete broken ones; returns how many were adopted.

        Happens by itself when the index was lost. ``min_age``: see ``adopt_files``. StoreError.
        """
        try:
            return self._index.rebuild(min_age)
        except TROUBLE as error:
            self._index.heal(error)
            raise StoreError(f"The index of {self.folder} cannot be rebuilt: {error}.") from error

    def close(self) -> None:
        """Write what is pending and let go of the files. May be called twice."""
        if self._index.closed:
            return
        self._writer.add(self._index.close)  # connections belong to threads
        self._writer.flush()
        self._index.closed = True
        self._index.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _header(self, id: str, stream: BinaryIO) -> Header:
        """The checked header of a record; parsed once as long as its file stays the same."""
        stat = os.fstat(stream.fileno())
        state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        known = self._headers.get(id)
        if known is not None and known[0] == state:
            return known[1]
        header = read_header(stream)
        if header.entry.id != id:
            raise RecordError(f"its file is that of record {header.entry.id}")
        while len(self._headers) >= HEADERS_KEPT:
            self._headers.pop(next(iter(self._headers)), None)
        self._headers[id] = (state, header)
        return header

    def _put_quietly(self, draft: Draft) -> None:
        try:
            self.put(draft)
        except Exception as error:  # whatever a draft may hold: the next one must be written
            self._index.say("Store %s: a run was not recorded: %s", self.folder, error)

    def _sweep(self) -> None:
        """Once per process: adopt or delete what a process that died left behind."""
        self._quietly("cannot be swept", self._index.rebuild, ORPHAN_AGE)

    def _quietly(self, what: str, job: Callable[..., object], *args: object) -> None:
        try:
            job(*args)
        except (StoreError, *TROUBLE) as error:
            self._trouble(what, error)

    def _trouble(self, what: str, error: Exception) -> None:
        self._index.say("Store %s %s: %s", self.folder, what, error)
        self._index.heal(error)
