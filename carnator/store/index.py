"""One store folder's index: opened, made anew when it is lost, looked at, and counted in.

Everything here raises what the file system and the database raise (``TROUBLE``); what that means
to a caller is decided in ``store.py``. Records come and go in ``commit.py``.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .brief import Brief, brief_of, unpack_brief
from .database import TROUBLE, SafeCache
from .disk import UnsafeRow
from .errors import RecordError, StoreError
from .folder import prepare
from .lock import WriterLock
from .memory import Kept
from .rebuild import rebuild, restore_pins
from .record import Entry, is_record_id, loads, unpack_entry
from .schema import LOCK_TIMEOUT, database_identity, discard_database, examine, is_damage
from .shelf import Shelf, Shelves
from .value import Usage

log = logging.getLogger("carnator")

LOCK_FILE = "writer.lock"
READY = "ready"  # a row: the index holds all records there are
ENTRIES_KEPT = 512  # parsed index rows in memory
SHELVES_KEPT = 64 * 2**20  # bytes of briefs and prepared searches in memory


class Index:
    """Records of one folder. Any thread may call any method."""

    def __init__(self, folder: Path) -> None:
        """``folder``: resolved. StoreError if it cannot be written."""
        self.folder = folder
        self.root = folder
        self.closed = False
        # The right to write is taken before the inner lock, never after it.
        self._writers = WriterLock()
        self._lock = threading.RLock()
        self._entries: Kept[Entry] = Kept(ENTRIES_KEPT)  # rows never change
        self._shelves = Shelves(SHELVES_KEPT)
        self._said: set[str] = set()
        self._cache: SafeCache | None = None
        self._identity: tuple[int, int] | None = None
        self.open()

    # The database as a whole.

    def open(self) -> SafeCache:
        """The database, opened anew when its file was deleted or replaced. StoreError."""
        try:
            with self._lock:
                if (cache := self._usable()) is not None:
                    return cache
            with self._writers.held(self.root / LOCK_FILE, LOCK_TIMEOUT), self._lock:
                return self._usable() or self._repair()
        except TROUBLE as error:
            raise StoreError(
                f"The store folder {str(self.folder)!r} cannot be used ({error}); choose "
                "another folder or make this one writable."
            ) from error

    @contextmanager
    def writing(self) -> Iterator[SafeCache]:
        """The database, with no other writer in any process. StoreError, ``TROUBLE``."""
        self.open()  # its folder holds the lock
        with self._writers.held(self.root / LOCK_FILE, LOCK_TIMEOUT):
            yield self.open()

    def close(self) -> None:
        """Let go of this thread's connection; the index stays usable until ``closed`` is set."""
        with self._lock:
            if self._cache is not None:
                self._cache.close()

    def heal(self, error: BaseException) -> None:
        """Throw a damaged database away; the next use rebuilds it from the files."""
        if not is_damage(error):
            return
        lock = self._writers.held(self.root / LOCK_FILE, LOCK_TIMEOUT)
        with suppress(*TROUBLE), lock, self._lock:
            # Another process may have met the damage first, and have made a new one.
            if self._identity == database_identity(self.root):
                self.close()
                discard_database(self.root)

    def relax(self) -> None:
        """Give back the memory of everything that can be read again."""
        self._entries.clear()
        self._shelves.clear()

    def _usable(self) -> SafeCache | None:
        """The open database if its file is still the same, else the one that is there now if it
        can be used as it is."""
        if self.closed:
            raise StoreError(f"The store {self.folder} is closed; open it again.")
        if self._cache is not None and self._identity == database_identity(self.root):
            return self._cache
        if self._cache is not None:
            self._cache.close()
            self._cache = None
            self.relax()
        self.root = prepare(self.folder)
        fault, fresh = examine(self.root)
        if fault is None and not fresh:
            try:
                cache = SafeCache(self.root)
                # Without it another process is still filling the index, or died at that.
                if cache.small(READY) is not None:
                    return self._use(cache)
                cache.close()
            except (sqlite3.DatabaseError, UnsafeRow) as error:
                if isinstance(error, sqlite3.DatabaseError) and not is_damage(error):
                    raise
        return None

    def _repair(self) -> SafeCache:
        """Make a database where none can be used, with what the payload files say."""
        fault, _ = examine(self.root)
        try:
            if fault is None:
                return self._fill(SafeCache(self.root))
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            fault = str(error)
        log.warning("Store %s: the index is not usable (%s); rebuilding it.", self.root, fault)
        discard_database(self.root)
        return self._fill(SafeCache(self.root))

    def _fill(self, cache: SafeCache) -> SafeCache:
        if found := rebuild(cache, self.root):
            log.info("Store %s: %d records found again.", self.folder, found)
        restore_pins(cache, self.root)
        cache.set(READY, b"1")
        return self._use(cache)

    def _use(self, cache: SafeCache) -> SafeCache:
        self._cache, self._identity = cache, database_identity(self.root)
        return cache

    # Looking.

    def entries(self, partition: str | None = None) -> list[Entry]:
        """All records, or those of a partition, newest first. A damaged index row is dropped."""
        found = [self.entry(i, partition) for i in self.open().ids(partition)]
        entries = [entry for entry in found if entry is not None]
        return sorted(entries, key=lambda e: (e.created, e.id), reverse=True)

    def entry(self, record_id: str, partition: str | None = None) -> Entry | None:
        """One record; None if there is none, or if its row was damaged and is dropped."""
        entry = self._entries.get(record_id)
        try:
            if entry is None:
                row = self.open().small(f"entry:{record_id}")
                if row is None:
                    return None
                entry = unpack_entry(row, record_id)
                self._entries.keep(record_id, entry)
            if partition is not None and entry.partition != partition:
                raise RecordError(f"its row stands under partition {partition!r:.80}")
        except (RecordError, UnsafeRow) as error:
            self.drop(record_id, str(error))
            return None
        return entry

    def shelf(self, partition: str) -> Shelf:
        """The records of a partition as matching looks at them."""
        cache = self.open()
        state = (self._identity, cache.changes()[0])
        kept = self._shelves.get(partition)
        if kept is not None and kept[0] == state:
            return kept[1]
        prefix = f"brief:{partition}"
        if kept is None:
            briefs = {i: self._brief(i, row) for i, row in cache.smalls(prefix)}
            shelf = Shelf({i: brief for i, brief in briefs.items() if brief is not None})
        else:
            shelf = kept[1].after(
                cache.briefed(partition), lambda i: self._brief(i, cache.small(f"{prefix}:{i}"))
            )
        self._shelves.keep(partition, state, shelf)
        return shelf

    def briefs(self) -> list[Brief]:
        """The briefs of all records."""
        found = []
        for name, row in self.open().smalls("brief"):
            brief = self._brief(name.rpartition(":")[2], row)
            if brief is not None:
                found.append(brief)
        return found

    def _brief(self, record_id: str, row: bytes | None) -> Brief | None:
        try:
            return unpack_brief(row or b"", record_id)
        except RecordError:
            entry = self.entry(record_id)  # the brief repeats what the entry says
            return None if entry is None else brief_of(entry)

    def pinned(self) -> set[str]:
        return set(self.open().names("pin"))

    def usage(self) -> dict[str, Usage]:
        return {record_id: Usage.unpack(row) for record_id, row in self.open().smalls("use")}

    def last_limit(self) -> int | None:
        """The size limit the store was last written under."""
        try:
            limit = loads((self.open().small("limit") or b"").decode("ascii"))
        except (RecordError, UnicodeError, *TROUBLE):
            return None
        return limit if type(limit) is int and 0 < limit < 1 << 62 else None

    def totals(self) -> tuple[int, int, Usage]:
        """Records, bytes, and the use over all records there ever were."""
        cache = self.open()
        return cache.tally("entry"), cache.volume_bytes(), _usage(cache, "totals")

    # Counting.

    def count_hit(self, record_id: str, seconds: float) -> None:
        """Add a hit to the record (if it is still there) and to the totals."""
        cache, now = self.open(), time.time()
        with cache.change(records=False):
            keys = ["totals"]
            if is_record_id(record_id) and cache.small(f"entry:{record_id}") is not None:
                keys.append(f"use:{record_id}")
            for key in keys:
                cache.set(key, _usage(cache, key).add(seconds, now).pack())

    def claim(self, name: str, owner: str) -> str:
        """Who holds a name: the first who asked for it."""
        cache, key = self.open(), f"claim:{name}"
        with cache.transact():
            holder = cache.small(key)
            if holder is None:
                cache.set(key, owner.encode())
                return owner
            return holder.decode("ascii", "replace")

    # Letting go.

    def erase(self, record_ids: Iterable[str]) -> int:
        """Delete records: out of sight first, in one transaction, then file by file. Returns how
        many there were."""
        cache, record_ids = self.open(), list(record_ids)
        with cache.change():
            found = cache.hide(record_ids)
        for record_id in record_ids:
            self._entries.drop(record_id)
        cache.forget(record_ids)
        return found

    def drop(self, record_id: str, reason: str) -> None:
        """Delete a bad record and say so; never raises."""
        self.say("Store %s: dropped record %s: %s.", self.folder, record_id[:40], reason)
        try:
            self.erase([record_id])
        except (StoreError, *TROUBLE) as error:
            self.say("Store %s: the record stays, as it cannot be deleted: %s", self.folder, error)
            self.heal(error)

    def say(self, message: str, *args: object) -> None:
        """Log a line once: a full disk must not fill the log as well."""
        line = message % args
        if line not in self._said and len(self._said) < 1000:
            self._said.add(line)
            log.warning("%s", line)


def _usage(cache: SafeCache, key: str) -> Usage:
    try:
        return Usage.unpack(cache.small(key))
    except UnsafeRow:
        return Usage()
