"""The index file as a whole: is it ours, is it new, is it damaged; and throwing it away."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from diskcache.core import DBNAME, METADATA  # type: ignore[import-untyped]

from .disk import FILE_NAME

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


def plain_text(value: Any) -> str:
    """Text selected as a blob; what is not UTF-8 cannot make the whole query fail then."""
    return bytes(value or b"").decode("utf-8", "replace")


def payload_files_on_disk(root: Path) -> list[str]:
    """Names ("ab/cd/....val") of all payload files under ``root``, linked folders left out."""
    names = []
    for folder, _, files in os.walk(root):
        sub = Path(folder).relative_to(root).as_posix()
        names += [f"{sub}/{file}" for file in files if FILE_NAME.fullmatch(f"{sub}/{file}")]
    return names


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


def examine(root: Path) -> tuple[str | None, bool]:
    """Why the database in ``root`` cannot be one of ours (None if it can), and if it is new.

    Raises what SQLite raises for passing reasons (locked, read-only, full).
    """
    path = root / DBNAME
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return "it is not a plain file", False
    if not path.exists():
        return None, True
    with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT, isolation_level=None)) as connection:
        sql: Callable[..., sqlite3.Cursor] = connection.execute
        try:
            sql("PRAGMA trusted_schema = 0")
            for (text,) in sql("SELECT CAST(sql AS BLOB) FROM sqlite_master WHERE sql NOTNULL"):
                if not _SCHEMA.fullmatch(" ".join(plain_text(text).split())):
                    return f"foreign schema: {plain_text(text)!r:.80}", False
            present = set()
            for table, expected in _COLUMNS.items():
                columns = [row[1] for row in sql(f"PRAGMA table_info({table})")]
                if columns and columns != expected.split():
                    return f"foreign columns in table {table}", False
                present |= {table} if columns else set()
            if "Settings" in present:
                for (key,) in sql("SELECT CAST(key AS BLOB) FROM Settings"):
                    if plain_text(key) not in SETTINGS and plain_text(key) not in METADATA:
                        return f"foreign setting: {plain_text(key)!r:.80}", False
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return str(error), False
    return None, "Cache" not in present
