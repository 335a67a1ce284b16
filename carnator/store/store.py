"""The store: records of dense runs in one folder, shared by threads and processes.

A generation never fails because of the store: what the engine calls logs trouble and goes on, and
``read`` raises RecordError alone. What a person asks for (``care.py``) raises StoreError.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from .care import Care
from .commit import Limits, commit
from .database import TROUBLE
from .disk import UnsafeRow
from .errors import StoreError
from .folder import resolve
from .header import read_tensors
from .index import Index
from .memory import under_pressure
from .payload import encode
from .reading import Reader
from .record import Draft, Entry, is_record_id
from .shelf import Shelf
from .writer import Writer

DEFAULT_SIZE = 8 * 2**30
DISK_FLOOR = 2**30  # bytes left free on the disk (start value)
PENDING_LIMIT = 2**29  # bytes of records waiting to be written


@dataclass(frozen=True)
class StoreStats:
    """Totals. ``bytes``: payload files and index rows; ``hits`` and ``seconds_saved``: ever."""

    folder: Path
    records: int
    bytes: int
    size_limit: int
    hits: int
    seconds_saved: float


class Store(Care):
    """Records of dense runs under a byte limit. Safe to use from several threads and processes."""

    _shared: dict[str, Store] = {}
    _shared_lock = threading.Lock()

    def __init__(
        self,
        folder: Path | str,
        size_limit: int | None = None,
        *,
        namespace: str = "",
        disk_floor: int = DISK_FLOOR,
    ) -> None:
        """Args:
            size_limit: bytes that the store may take, above 0; None is what it was last used
                with.
            namespace: whose records these are, on a server with several users; letters, digits,
                "-" and "_", or "" for a folder of one user. The limit is each name space's own.
            disk_floor: bytes that are left free on the disk.

        StoreError if the folder cannot be written or an argument is out of range.
        """
        self.folder = resolve(folder, namespace)
        if size_limit is not None:
            self.size_limit = size_limit
        self.disk_floor = disk_floor
        self._index = Index(self.folder)
        if size_limit is None:
            self.size_limit = self._index.last_limit() or DEFAULT_SIZE
        self._writer = Writer(PENDING_LIMIT)
        self._swept = False
        self._reader = Reader(self._index, self._trouble)

    @classmethod
    def open(
        cls, folder: Path | str, size_limit: int = DEFAULT_SIZE, *, namespace: str = ""
    ) -> Store:
        """The one instance of this process for a folder and name space; the latest ``size_limit``
        holds."""
        key = os.path.normcase(resolve(folder, namespace))
        with cls._shared_lock:
            store = cls._shared.get(key)
            if store is None or store._index.closed:
                store = cls._shared[key] = cls(folder, size_limit, namespace=namespace)
            store.size_limit = size_limit
            return store

    @property
    def size_limit(self) -> int:
        """Bytes the store may take; never more."""
        return self._size_limit

    @size_limit.setter
    def size_limit(self, limit: int) -> None:
        if type(limit) is not int or limit <= 0:
            raise StoreError(
                f"The store's size limit is {limit!r}; give a number of bytes above 0."
            )
        self._size_limit = limit

    @property
    def limits(self) -> Limits:
        return Limits(self._size_limit, self.disk_floor)

    # Recording.

    def put(self, draft: Draft) -> str:
        """Check and write a record, return its id. It is visible once it is completely written.

        An older record of the same request is replaced; the least valuable ones make room.
        StoreError if the draft is refused or cannot be written.
        """
        if draft.encode is not None:
            draft = replace(draft, tensors=draft.encode(), encode=None)
        payload = encode(draft, uuid.uuid4().hex, time.time())
        entry = payload.entry
        if entry.nbytes > self.size_limit:
            raise StoreError(
                f"The record takes {entry.nbytes} bytes, the store's limit is {self.size_limit}; "
                "raise the limit."
            )
        try:
            commit(self._index, payload, self.limits)
        except TROUBLE as error:
            self._index.heal(error)
            raise StoreError(f"The record cannot be written to {self.folder}: {error}.") from error
        return entry.id

    def submit(self, draft: Draft) -> None:
        """Have ``put`` done in the background. Never raises; what goes wrong is logged."""
        try:
            nbytes = sum(t.numel() * t.element_size() for t in draft.tensors.values())
            short = under_pressure()
            if short:
                self.relax()
            if not self._writer.add(partial(self._put_quietly, draft), nbytes, alone=short):
                self._index.say("Store %s is busy writing; a run was not recorded.", self.folder)
            if not self._swept:
                self._swept = True
                self._writer.add(self._sweep)
        except Exception as error:  # whatever a draft may hold: the generation goes on
            self._index.say("Store %s: a run was not recorded: %s", self.folder, error)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for what is pending in the background; False if ``timeout`` seconds passed first."""
        return self._writer.flush(timeout)

    # Finding.

    def entries(self, partition: str | None = None) -> list[Entry]:
        """All records, or those of a partition, newest first. A damaged index row is dropped."""
        try:
            return self._index.entries(partition)
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot be listed", error)
            return []

    def entry(self, id: str) -> Entry | None:
        """One record, or None."""
        try:
            return self._index.entry(id) if is_record_id(id) else None
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot be read", error)
            return None

    def shelf(self, partition: str) -> Shelf:
        """The records of a partition, to be searched by request and by signature."""
        try:
            return self._index.shelf(partition)
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot be searched", error)
            return Shelf({})

    def read(self, id: str, names: Sequence[str]) -> dict[str, Tensor]:
        """The named tensors of a record, read alone and checked. RecordError."""
        with self._reader.reading(id) as (stream, header):
            return read_tensors(stream, header, names)

    # Counting.

    def note_hit(self, id: str, seconds_saved: float) -> None:
        """Count a hit and the seconds it saved (0 to 1e9), in the background. Never raises."""
        seconds = float(seconds_saved) if 0 <= seconds_saved < 1e9 else 0.0  # NaN counts as 0
        self._writer.add(
            partial(self._quietly, "cannot count a hit", self._index.count_hit, id, seconds)
        )

    def claim(self, name: str, owner: str) -> str:
        """Take a name for ``owner`` (both short ASCII) unless somebody holds it; returns the
        holder, or ``owner`` if the store cannot be asked. Never raises."""
        try:
            return self._index.claim(name, owner)
        except (StoreError, UnsafeRow, *TROUBLE) as error:
            self._trouble("cannot keep a claim", error)
            return owner

    def stats(self) -> StoreStats:
        """Totals; zeros if the store cannot be read (logged)."""
        try:
            records, size, use = self._index.totals()
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot be read", error)
            return StoreStats(self.folder, 0, 0, self.size_limit, 0, 0.0)
        limit = self.size_limit
        return StoreStats(self.folder, records, size, limit, use.hits, use.seconds_saved)

    # Letting go.

    def relax(self) -> None:
        """Give back the memory of all that can be read again."""
        self._index.relax()
        self._reader.relax()

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

    def _put_quietly(self, draft: Draft) -> None:
        try:
            self.put(draft)
        except Exception as error:  # whatever a draft may hold: the next one must be written
            self._index.say("Store %s: a run was not recorded: %s", self.folder, error)

    def _sweep(self) -> None:
        """Once per process: adopt or delete what a process that died left behind."""
        self._quietly("cannot be swept", self.rebuild)

    def _quietly(self, what: str, job: Callable[..., object], *args: object) -> None:
        try:
            job(*args)
        except (StoreError, *TROUBLE) as error:
            self._trouble(what, error)

    def _trouble(self, what: str, error: Exception) -> None:
        self._index.say("Store %s %s: %s", self.folder, what, error)
        self._index.heal(error)
