"""The index: diskcache over one SQLite file, hardened against a folder that others could write.

Rows have text keys and JSON or packed bytes as value. Per record:

- ``record:<id>`` names the payload file (tag = state, none for a visible record);
- ``entry:<id>`` is the sealed entry (tag = partition), which makes the record visible;
- ``brief:<partition>:<id>`` is what operations over all records need of it (tag = the request);
- ``use:<id>`` says how often it was used, ``pin:<id>`` that it stays.

``totals`` counts use over all records, ``changes`` counts changes, ``claim:<name>`` says who holds
a name, ``limit`` is the last size limit, ``ready`` says that the index is complete. Rows of other
kinds are left alone: a later version may know them.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Error as SqliteError
from typing import Any, BinaryIO

from diskcache import Cache, Timeout  # type: ignore[import-untyped]
from diskcache.core import ENOVAL, METADATA

from .disk import MODE_BINARY, MODE_RAW, PlainDisk, UnsafeRow
from .errors import RecordError
from .record import dumps, loads
from .schema import LOCK_TIMEOUT, SETTINGS, plain_text

log = logging.getLogger("carnator")

# Passing trouble and damage alike: what a database call can raise besides our own errors.
TROUBLE = (OSError, SqliteError, Timeout, UnsafeRow)
# States of a record row, in its tag; a visible record has none.
WRITING, GONE = "writing", "gone"
ID_LENGTH = 32  # characters


class SafeCache(Cache):  # type: ignore[misc]
    """diskcache.Cache without pickle, whose settings are ours whatever the settings table says."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), timeout=LOCK_TIMEOUT, disk=PlainDisk, **SETTINGS)
        self._drop_foreign_rows()

    def reset(self, key: str, value: Any = ENOVAL, update: bool = True) -> Any:
        """As in diskcache, for known settings only, at our values.

        The original turns any row of the settings table into an attribute of the cache or its disk
        (another directory, say) or into a PRAGMA.
        """
        if key in SETTINGS:
            return super().reset(key, SETTINGS[key], update)
        return super().reset(key, value, update) if key in METADATA else None

    # Looking.

    def ids(self, partition: str | None = None) -> list[str]:
        """Ids of the visible records."""
        if partition is None:
            return self.names("entry")
        query = "SELECT CAST(key AS BLOB) FROM Cache WHERE tag = ? AND raw = 1"
        keys = (plain_text(key) for (key,) in self._sql(query, (partition,)))
        return [key.removeprefix("entry:") for key in keys if key.startswith("entry:")]

    def same_request(self, partition: str, identity: str) -> list[str]:
        """Ids of the visible records of a request."""
        query = "SELECT CAST(key AS BLOB) FROM Cache WHERE tag = ? AND raw = 1"
        rows = self._sql(query, (request_tag(partition, identity),))
        return [plain_text(key).rpartition(":")[2] for (key,) in rows]

    def briefed(self, partition: str) -> list[str]:
        """Ids of the records of a partition that have a brief, from the index of keys alone, and
        in one piece: there can be thousands, and this is on the way of every request."""
        prefix = f"brief:{partition}"
        start, length = len(prefix) + 2, len(prefix) + 1 + ID_LENGTH
        query = (
            "SELECT CAST(GROUP_CONCAT(SUBSTR(CAST(key AS BLOB), ?), '') AS BLOB) FROM Cache"
            f" WHERE {_RANGE} AND raw = 1 AND LENGTH(CAST(key AS BLOB)) = ?"
        )
        row = self._sql(query, (start, *_bounds(prefix), length)).fetchone()
        ids = bytes(row[0] or b"").decode("latin-1")  # a byte a character, whatever it is
        return [ids[i : i + ID_LENGTH] for i in range(0, len(ids), ID_LENGTH)]

    def tally(self, prefix: str) -> int:
        """How many keys begin with "<prefix>:"."""
        query = f"SELECT COUNT(*) FROM Cache WHERE {_RANGE} AND raw = 1"
        return int(self._sql(query, _bounds(prefix)).fetchone()[0])

    def small(self, key: str) -> bytes | None:
        """The bytes kept in a row itself; None without a row. UnsafeRow for any other content."""
        query = f"SELECT {_SMALL} FROM Cache WHERE {_KEY}"
        row = self._sql(query, (key,)).fetchone()
        if row is None:
            return None
        mode, kind, value = row
        if mode != MODE_RAW or kind != "blob":
            raise UnsafeRow(f"a row has storage mode {mode!r} and a {kind}, which is not ours")
        return bytes(value)

    def names(self, prefix: str) -> list[str]:
        """What follows "<prefix>:" in all keys that begin so, from the index of keys alone."""
        query = f"SELECT CAST(key AS BLOB) FROM Cache WHERE {_RANGE} AND raw = 1"
        keys = self._sql(query, _bounds(prefix))
        return [plain_text(key)[len(prefix) + 1 :] for (key,) in keys]

    def smalls(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """What follows "<prefix>:" in a key, and the bytes in its row, for all that begin so."""
        query = f"SELECT CAST(key AS BLOB), {_SMALL} FROM Cache WHERE {_RANGE} AND raw = 1"
        # All at once: who looks at them may delete some.
        for key, mode, kind, value in self._sql(query, _bounds(prefix)).fetchall():
            if mode == MODE_RAW and kind == "blob":
                yield plain_text(key)[len(prefix) + 1 :], bytes(value)

    def payload_name(self, record_id: str) -> str:
        """File name of a record's payload. KeyError without a row, UnsafeRow if it is not ours."""
        query = f"SELECT mode, CAST(filename AS BLOB) FROM Cache WHERE {_KEY}"
        row = self._sql(query, (f"record:{record_id}",)).fetchone()
        if row is None:
            raise KeyError(record_id)
        if row[0] != MODE_BINARY:
            raise UnsafeRow(f"its row has storage mode {row[0]!r}, which this store never writes")
        return plain_text(row[1])

    def open_payload(self, filename: str) -> BinaryIO:
        """Open a payload file. FileNotFoundError without one, UnsafeRow for any path trick."""
        stream: BinaryIO = self._disk.fetch(MODE_BINARY, filename, None, True)
        return stream

    def volume_bytes(self) -> int:
        """Bytes of all payload files and of what the index says of them. The database keeps the
        sum; ``count_bytes`` makes sure of it."""
        row = self._sql("SELECT value FROM Settings WHERE key = 'size'").fetchone()
        if row is None or type(row[0]) not in (int, float) or not 0 <= row[0] < 1 << 62:
            return self.count_bytes()
        return int(row[0])

    def count_bytes(self) -> int:
        """``volume_bytes``, added up anew."""
        self._sql(
            "INSERT OR REPLACE INTO Settings VALUES"
            " ('size', (SELECT CAST(TOTAL(size) AS INTEGER) FROM Cache))"
        )
        return int(self._sql("SELECT value FROM Settings WHERE key = 'size'").fetchone()[0])

    def payload_files(self) -> dict[str, str]:
        """Key by file name (with "/") of every row that has a file."""
        query = "SELECT CAST(key AS BLOB), CAST(filename AS BLOB) FROM Cache WHERE filename NOTNULL"
        rows = self._sql(query)
        return {plain_text(name).replace("\\", "/"): plain_text(key) for key, name in rows}

    def unfinished(self) -> list[tuple[str, str, str]]:
        """(id, state, file name) of records being written or deleted."""
        query = (
            "SELECT CAST(key AS BLOB), tag, CAST(filename AS BLOB) FROM Cache"
            f" WHERE tag IN ('{WRITING}', '{GONE}') AND {_RANGE} AND raw = 1"
        )
        rows = self._sql(query, _bounds("record"))
        return [(plain_text(key)[7:], tag, plain_text(name)) for key, tag, name in rows]

    def changes(self) -> tuple[int, int]:
        """Counters of changes: to which records there are, and to anything a person can see."""
        row = self.small("changes")
        try:
            records, anything = loads((row or b"").decode("ascii"))
            if type(records) is int and type(anything) is int:
                return records, anything
        except (RecordError, TypeError, ValueError):
            pass
        return 0, 0

    # Changing.

    @contextmanager
    def change(self, records: bool = True) -> Iterator[None]:
        """One transaction: all of it or nothing, and counted as a change."""
        with self.transact():
            yield
            known, anything = self.changes()
            if not anything:  # a new index must not repeat the counts of the one before it
                known = anything = secrets.randbits(48)
            self.set("changes", dumps([known + records, anything + 1]).encode("ascii"))

    def reserve(self, record_id: str, size: int) -> str:
        """Add the invisible row of a record about to be written; returns its file's name."""
        filename: str = self._disk.filename()[0]
        self.adopt(record_id, filename, size, WRITING)
        return filename

    def adopt(self, record_id: str, filename: str, size: int, state: str | None = None) -> bool:
        """Add a record row for a payload file; False if the record already has one."""
        filename, key = filename.replace("/", os.sep), f"record:{record_id}"
        with self._transact() as (sql, _):
            query = f"SELECT 1 FROM Cache WHERE {_KEY}"
            if sql(query, (key,)).fetchone() is not None:
                return False
            self._row_insert(
                key, True, time.time(), (None, state, size, MODE_BINARY, filename, None)
            )
            return True

    def settle(self, record_id: str) -> None:
        """Mark a record's payload as completely written."""
        self._sql(f"UPDATE Cache SET tag = NULL WHERE {_KEY}", (f"record:{record_id}",))

    def hide(self, record_ids: Iterable[str]) -> int:
        """Make records invisible for good, within a ``change``; returns how many were visible."""
        found = 0
        for record_id in record_ids:
            entry = (f"entry:{record_id}",)
            row = self._sql(f"SELECT CAST(tag AS BLOB) FROM Cache WHERE {_KEY}", entry).fetchone()
            found += row is not None
            partition = plain_text(row[0]) if row else ""
            for kind in ("entry", f"brief:{partition}", "use", "pin"):
                self._sql(f"DELETE FROM Cache WHERE {_KEY}", (f"{kind}:{record_id}",))
            self._sql(f"UPDATE Cache SET tag = '{GONE}' WHERE {_KEY}", (f"record:{record_id}",))
        return found

    def forget(self, record_ids: Iterable[str]) -> None:
        """Delete the files, then the rows, of hidden records. A file that cannot be deleted (open
        elsewhere, on Windows) keeps its row, and is tried again with the next record written."""
        gone = f"{_KEY} AND tag = '{GONE}'"
        query = f"SELECT mode, CAST(filename AS BLOB) FROM Cache WHERE {gone}"
        for record_id in record_ids:
            key = (f"record:{record_id}",)
            row = self._sql(query, key).fetchone()
            if row is None:
                continue
            if row[0] != MODE_BINARY or self._disk.remove(plain_text(row[1])):
                self._sql(f"DELETE FROM Cache WHERE {gone}", key)

    def trim(self, kind: str, most: int) -> None:
        """Keep the ``most`` newest rows of a kind."""
        self._sql(
            f"DELETE FROM Cache WHERE rowid IN (SELECT rowid FROM Cache WHERE {_RANGE}"
            " AND raw = 1 ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
            (*_bounds(kind), most),
        )

    def remove_file(self, filename: str) -> None:
        """Delete a payload file that belongs to no row."""
        self._disk.remove(filename)

    def _drop_foreign_rows(self) -> None:
        rows = self._sql(f"SELECT rowid, CAST(filename AS BLOB) FROM Cache WHERE {_FOREIGN}")
        found = rows.fetchall()
        for rowid, filename in found:
            self._sql("DELETE FROM Cache WHERE rowid = ?", (rowid,))
            if filename is not None:
                self._disk.remove(plain_text(filename))
        if found:
            log.warning("Store %s: dropped %d foreign rows.", self.directory, len(found))


def request_tag(partition: str, identity: str) -> str:
    """The tag of a brief's row; no partition, which is the tag of an entry's, holds a colon."""
    return f"{partition}:{identity}"


def _bounds(prefix: str) -> tuple[str, str]:
    """The bounds of the keys that begin with "<prefix>:"; ";" is the character after ":"."""
    return f"{prefix}:", f"{prefix};"


_KEY = "key = ? AND raw = 1"
_RANGE = "key >= ? AND key < ?"
# Read as bytes: a TEXT value that is not UTF-8 would make the whole query fail.
_SMALL = "mode, typeof(value), CAST(value AS BLOB)"
_FOREIGN = (
    "raw IS NOT 1 OR typeof(key) <> 'text' OR typeof(mode) <> 'integer' OR mode NOT IN (1, 2)"
    " OR expire_time NOTNULL OR (mode = 1 AND typeof(value) <> 'blob')"
)
