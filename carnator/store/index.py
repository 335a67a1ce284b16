"""One store folder's index: opened, reopened when it is lost, and the operations on records.

Everything here raises what the file system and the database raise (``TROUBLE``); what that means
to a caller is decided in ``store.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

from .database import (
    TROUBLE,
    SafeCache,
    database_identity,
    discard_database,
    is_damage,
    open_database,
    payload_files_on_disk,
)
from .disk import UnsafeRow
from .errors import RecordError, StoreError
from .folder import prepare
from .payload import Payload
from .rebuild import adopt_files
from .record import Entry, is_record_id, pack_entry, unpack_entry
from .value import Usage, victims

log = logging.getLogger("carnator")
CLAIM_AGE = 180 * 86400.0  # seconds a claim is remembered


class Index:
    """Records of one folder. Any thread may call any method."""

    def __init__(self, folder: Path) -> None:
        """``folder``: resolved. StoreError if it cannot be written."""
        self.folder = folder
        self.root = folder
        self.closed = False
        self._lock = threading.RLock()
        self._known: dict[str, Entry] = {}  # parsed index rows; rows never change
        self._said: set[str] = set()
        self._cache: SafeCache | None = None
        self._identity: tuple[int, int] | None = None
        self.open()

    def open(self) -> SafeCache:
        """The database, opened anew when its file was deleted or replaced. StoreError."""
        with self._lock:
            if self.closed:
                raise StoreError(f"The store {self.folder} is closed; open it again.")
            if self._cache is not None and self._identity == database_identity(self.root):
                return self._cache
            old, self._cache, self._known = self._cache, None, {}
            if old is not None:
                old.close()
            self.root = prepare(self.folder)
            try:
                cache, orphans = open_database(self.root)
                found = adopt_files(cache, self.root, orphans, min_age=0.0)
            except TROUBLE as error:
                raise StoreError(
                    f"The store folder {str(self.folder)!r} cannot be used ({error}); choose "
                    "another folder or make this one writable."
                ) from error
            if found:
                log.info("Store %s: %d records found again.", self.folder, found)
            self._cache, self._identity = cache, database_identity(self.root)
            return cache

    def close(self) -> None:
        """Let go of this thread's connection; the index stays usable until ``closed`` is set."""
        with self._lock:
            if self._cache is not None:
                self._cache.close()

    def heal(self, error: BaseException) -> None:
        """Throw a damaged database away; the next use rebuilds it from the files."""
        if is_damage(error):
            with self._lock, suppress(OSError):
                self.close()
                discard_database(self.root)

    def entries(self, partition: str | None = None) -> list[Entry]:
        """All records, or those of a partition, newest first. A damaged index row is dropped."""
        cache = self.open()
        found = [self._entry(cache, i, partition) for i in cache.ids(partition)]
        entries = [entry for entry in found if entry is not None]
        if partition is None:
            self._known = {entry.id: entry for entry in entries}
        return sorted(entries, key=lambda e: (e.created, e.id), reverse=True)

    def commit(self, payload: Payload) -> None:
        """Payload first, then the row that makes it visible; after a failure neither stays.

        Then delete older records of the same request (of two writers at once the newest stays).
        """
        cache, entry = self.open(), payload.entry
        complete = False
        try:
            cache.set(f"record:{entry.id}", payload, read=True)
            cache.set(f"entry:{entry.id}", pack_entry(entry), tag=entry.partition)
            complete = True
        finally:
            if not complete:
                with suppress(*TROUBLE, StoreError):
                    self.erase(entry.id)
        for old in self.entries(entry.partition):
            if old.identity == entry.identity and (old.created, old.id) < (entry.created, entry.id):
                self.erase(old.id)

    def evict(self, limit: int, protect: str | None = None) -> None:
        """Come under ``limit`` bytes. Which records go first is decided in ``value.py`` alone."""
        cache = self.open()
        while (excess := cache.volume_bytes() - limit) > 0:
            usage = {key: Usage.unpack(row) for key, row in cache.usage().items()}
            chosen = victims(self.entries(), usage, excess, time.time(), protect)
            if not chosen:
                return
            for record_id in chosen:
                self.erase(record_id)

    def erase(self, record_id: str) -> bool:
        """Delete a record; False if there was none."""
        cache = self.open()
        self._known.pop(record_id, None)
        found = cache.delete(f"entry:{record_id}")  # first: nobody begins to read it any more
        cache.delete(f"use:{record_id}")
        return bool(cache.delete(f"record:{record_id}") or found)

    def drop(self, record_id: str, reason: str) -> None:
        """Delete a bad record and say so; never raises."""
        self.say("Store %s: dropped record %s: %s.", self.folder, record_id[:40], reason)
        try:
            self.erase(record_id)
        except (StoreError, *TROUBLE) as error:
            self.say("Store %s: the record stays, as it cannot be deleted: %s", self.folder, error)
            self.heal(error)

    def clear(self) -> None:
        """Delete every row and every payload file."""
        cache = self.open()
        self._known = {}
        cache.clear()
        for name in payload_files_on_disk(self.root):
            cache.remove_file(name)

    def count_hit(self, record_id: str, seconds: float) -> None:
        """Add a hit to the record (if it is still there) and to the totals."""
        cache, now = self.open(), time.time()
        with cache.transact():
            keys = ["totals"]
            if is_record_id(record_id) and f"entry:{record_id}" in cache:
                keys.append(f"use:{record_id}")
            for key in keys:
                cache.set(key, _usage(cache, key).add(seconds, now).pack())

    def claim(self, name: str, owner: str) -> str:
        """Who holds a name: the first who asked for it."""
        cache, key = self.open(), f"claim:{name}"
        with cache.transact():
            holder = cache.small(key)
            if holder is None:
                cache.set(key, owner.encode(), expire=CLAIM_AGE)
                return owner
            return holder.decode("ascii", "replace")

    def totals(self) -> tuple[int, int, Usage]:
        """Records, bytes, and the use over all records there ever were."""
        cache = self.open()
        return len(cache.ids()), cache.volume_bytes(), _usage(cache, "totals")

    def rebuild(self, min_age: float) -> int:
        """See ``adopt_files``."""
        cache = self.open()
        return adopt_files(cache, self.root, payload_files_on_disk(self.root), min_age)

    def say(self, message: str, *args: object) -> None:
        """Log a line once: a full disk must not fill the log as well."""
        line = message % args
        if line not in self._said and len(self._said) < 1000:
            self._said.add(line)
            log.warning("%s", line)

    def _entry(self, cache: SafeCache, record_id: str, partition: str | None) -> Entry | None:
        entry = self._known.get(record_id)
        try:
            if entry is None:
                row = cache.small(f"entry:{record_id}")
                if row is None:
                    return None  # deleted in between
                entry = unpack_entry(row, record_id)
            if partition is not None and entry.partition != partition:
                raise RecordError(f"its row stands under partition {partition!r:.80}")
        except (RecordError, UnsafeRow) as error:
            self.drop(record_id, str(error))
            return None
        self._known[record_id] = entry
        return entry


def _usage(cache: SafeCache, key: str) -> Usage:
    try:
        return Usage.unpack(cache.small(key))
    except UnsafeRow:
        return Usage()
