"""The index: diskcache over one SQLite file, hardened against a folder that others could write.

Three kinds of rows, all with text keys and JSON bytes or a file as value:
``record:<id>`` the payload file, ``entry:<id>`` the sealed entry (tag = partition), which makes
the record visible, and ``use:<id>`` how often it was used. ``totals`` counts over all records.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO

from diskcache import Cache, Timeout  # type: ignore[import-untyped]
from diskcache.core import DBNAME, ENOVAL, METADATA

from .disk import FILE_NAME, MODE_BINARY, MODE_RAW, PlainDisk, UnsafeRow

log = logging.getLogger("carnator")

# Passing trouble and damage alike: what a database call can raise besides our own errors.
TROUBLE = (OSError, sqlite3.Error, Timeout, UnsafeRow)
LOCK_TIMEOUT = 15.0  # seconds to wait for another process's write
SETTINGS: dict[str, Any] = {
    "statistics": 0,
    "tag_index": 1,
    "eviction_policy": "none",  # the store evicts by value itself
    "size_limit": 1 << 62,
    "cull_limit": 0,
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 1 << 11,  # pages
    "sqlite_journal_mode": "wal",
    "sqlite_mmap_size": 0,  # a mapped file that shrinks kills the process
    "sqlite_synchronous": 1,
    "sqlite_trusted_schema": 0,
    "disk_min_file_size": 1 << 22,  # index rows stay in the database
    "disk_pickle_protocol": 0,  # diskcache insists on the setting; PlainDisk ignores it
}
# Everything diskcache creates, and nothing that could carry code: no views, no generated columns.
_SCHEMA = re.compile(
    r"CREATE TABLE (Settings|Cache) ?\([^()]*\)"
    r"|CREATE UNIQUE INDEX Cache_key_raw ON Cache ?\(key, raw\)"
    r"|CREATE INDEX Cache_(?!key_raw)\w+ ON Cache ?\([\w, ]+\)( WHERE \w+ IS NOT NULL)?"
    r"|CREATE TRIGGER Settings_(count|size)_(insert|update|delete) AFTER (INSERT|UPDATE|DELETE)"
    r" ON Cache FOR EACH ROW BEGIN UPDATE Settings SET value = value [+-] (1|NEW\.size|OLD\.size)"
    r'( - OLD\.size)? WHERE key = "(count|size)"; END'
)
_COLUMNS = {
    "Settings": "key value",
    "Cache": "rowid key raw store_time expire_time access_time access_count tag size mode filename"
    " value",
}


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

    def ids(self, partition: str | None = None) -> list[str]:
        """Ids of the visible records, from an index of the database alone."""
        args: tuple[str, ...] = () if partition is None else (partition,)
        where = "key >= 'entry:' AND key < 'entry;' AND raw = 1"
        rows = self._sql(
            f"SELECT CAST(key AS BLOB) FROM Cache WHERE {'tag = ?' if args else where}", args
        )
        keys = (_text(key) for (key,) in rows)
        return [key.removeprefix("entry:") for key in keys if key.startswith("entry:")]

    def small(self, key: str) -> bytes | None:
        """The bytes kept in a row itself; None without a row. UnsafeRow for any other content."""
        query = f"SELECT {_SMALL} FROM Cache WHERE key = ? AND raw = 1"
        row = self._sql(query, (key,)).fetchone()
        return None if row is None else _plain(*row)

    def usage(self) -> dict[str, bytes]:
        """Usage rows by record id."""
        query = (
            f"SELECT CAST(key AS BLOB), {_SMALL} FROM Cache"
            " WHERE key >= 'use:' AND key < 'use;' AND raw = 1 AND mode = 1"
        )
        return {_text(key)[4:]: bytes(row[2] or b"") for key, *row in self._sql(query)}

    def open_payload(self, record_id: str) -> BinaryIO:
        """Open a record's payload. KeyError without a row, FileNotFoundError without a file."""
        query = "SELECT mode, CAST(filename AS BLOB) FROM Cache WHERE key = ? AND raw = 1"
        row = self._sql(query, (f"record:{record_id}",)).fetchone()
        if row is None:
            raise KeyError(record_id)
        if row[0] != MODE_BINARY:
            raise UnsafeRow(f"its row has storage mode {row[0]!r}, which this store never writes")
        stream: BinaryIO = self._disk.fetch(MODE_BINARY, _text(row[1]), None, True)
        return stream

    def volume_bytes(self) -> int:
        """Bytes of all payload files and index rows."""
        query = "SELECT TOTAL(size) + TOTAL(LENGTH(value)) FROM Cache"
        return int(self._sql(query).fetchone()[0])

    def payload_files(self) -> dict[str, str]:
        """Key by file name (with "/") of every row that has a file."""
        query = "SELECT CAST(key AS BLOB), CAST(filename AS BLOB) FROM Cache WHERE filename NOTNULL"
        return {_text(name).replace("\\", "/"): _text(key) for key, name in self._sql(query)}

    def adopt(self, key: str, filename: str, size: int) -> bool:
        """Add a row for a payload file that has none; False if the key is already taken."""
        filename = filename.replace("/", os.sep)
        with self._transact() as (sql, _):
            query = "SELECT 1 FROM Cache WHERE key = ? AND raw = 1"
            if sql(query, (key,)).fetchone() is not None:
                return False
            columns = (None, None, size, MODE_BINARY, filename, None)
            self._row_insert(key, True, time.time(), columns)
            return True

    def remove_file(self, filename: str) -> None:
        """Delete a payload file that belongs to no row."""
        self._disk.remove(filename)

    def _drop_foreign_rows(self) -> None:
        rows = self._sql(f"SELECT rowid, CAST(filename AS BLOB) FROM Cache WHERE {_FOREIGN}")
        found = rows.fetchall()
        for rowid, filename in found:
            self._sql("DELETE FROM Cache WHERE rowid = ?", (rowid,))
            if filename is not None:
                self._disk.remove(_text(filename))
        if found:
            log.warning("Store %s: dropped %d foreign rows.", self.directory, len(found))


# Read as bytes: a TEXT value that is not UTF-8 would make the whole query fail.
_SMALL = "mode, typeof(value), CAST(value AS BLOB)"
_FOREIGN = (
    "raw IS NOT 1 OR typeof(key) <> 'text' OR typeof(mode) <> 'integer' OR mode NOT IN (1, 2)"
    " OR expire_time NOTNULL OR (mode = 1 AND typeof(value) <> 'blob')"
)


def _plain(mode: Any, kind: str, value: Any) -> bytes:
    if mode != MODE_RAW or kind != "blob":
        raise UnsafeRow(f"a row has storage mode {mode!r} and a {kind}, which is not ours")
    return bytes(value)


def _text(value: Any) -> str:
    return bytes(value or b"").decode("utf-8", "replace")


def payload_files_on_disk(root: Path) -> list[str]:
    """Names ("ab/cd/....val") of all payload files under ``root``, linked folders left out."""
    names = []
    for folder, _, files in os.walk(root):
        sub = Path(folder).relative_to(root).as_posix()
        names += [f"{sub}/{file}" for file in files if FILE_NAME.fullmatch(f"{sub}/{file}")]
    return names


def open_database(root: Path) -> tuple[SafeCache, list[str]]:
    """Open the index in ``root``; a damaged or foreign one is deleted and made anew.

    Returns the cache and, if it is new, the payload files that were there before it: nobody can
    be in the middle of writing those. Raises what SQLite and the file system raise for passing
    reasons (locked, read-only, full).
    """
    fault, fresh = _examine(root / DBNAME)
    orphans: list[str] = []
    if fresh:
        orphans = payload_files_on_disk(root)
        if not _examine(root / DBNAME)[1]:
            orphans = []  # another process was quicker, and takes care of them
    if fault is None:
        try:
            return SafeCache(root), orphans
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            fault = str(error)
    log.warning("Store %s: the index is not usable (%s); rebuilding it.", root, fault)
    orphans = payload_files_on_disk(root)
    discard_database(root)
    return SafeCache(root), orphans


def discard_database(root: Path) -> None:
    """Delete the index; payload files stay, to be adopted by a new one."""
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            (root / f"{DBNAME}{suffix}").unlink()


def database_identity(root: Path) -> tuple[int, int] | None:
    """What tells this database file from another one at the same path; None if there is none."""
    try:
        status = os.stat(root / DBNAME)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_damage(error: BaseException) -> bool:
    """Whether an error means a malformed or foreign database rather than passing trouble."""
    # Locked, full, read-only and I/O trouble are subclasses; damage is the class itself.
    return type(error) is sqlite3.DatabaseError


def _examine(path: Path) -> tuple[str | None, bool]:
    """Why a database file cannot be one of ours (None if it can), and if it is new."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return "it is not a plain file", False
    if not path.exists():
        return None, True
    with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT, isolation_level=None)) as connection:
        sql: Callable[..., sqlite3.Cursor] = connection.execute
        try:
            sql("PRAGMA trusted_schema = 0")
            for (text,) in sql("SELECT CAST(sql AS BLOB) FROM sqlite_master WHERE sql NOTNULL"):
                if not _SCHEMA.fullmatch(" ".join(_text(text).split())):
                    return f"foreign schema: {_text(text)!r:.80}", False
            present = set()
            for table, expected in _COLUMNS.items():
                columns = [row[1] for row in sql(f"PRAGMA table_info({table})")]
                if columns and columns != expected.split():
                    return f"foreign columns in table {table}", False
                present |= {table} if columns else set()
            if "Settings" in present:
                for (key,) in sql("SELECT CAST(key AS BLOB) FROM Settings"):
                    if _text(key) not in SETTINGS and _text(key) not in METADATA:
                        return f"foreign setting: {_text(key)!r:.80}", False
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return str(error), False
    return None, "Cache" not in present
