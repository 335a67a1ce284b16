"""One writer at a time, over all threads and processes that share a store.

The lock is SQLite's own, on an empty database file: the same primitive the index depends on, on
every platform, given back by the operating system when its holder dies at any instruction.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class WriterLock:
    """The right to write payload files, and to make or throw away the index. Reentrant."""

    def __init__(self) -> None:
        self._threads = threading.RLock()
        self._depth = 0

    @contextmanager
    def held(self, path: Path, timeout: float) -> Iterator[None]:
        """Hold the lock on the file ``path`` (made here, never written to).

        Raises sqlite3.OperationalError when nobody lets go of it within ``timeout`` seconds, or
        when the file cannot be used.
        """
        if not self._threads.acquire(timeout=timeout):
            raise sqlite3.OperationalError("another thread is writing to the store")
        try:
            if self._depth:
                yield
                return
            connection = _locked(path, timeout)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                connection.close()
        finally:
            self._threads.release()


def _locked(path: Path, timeout: float) -> sqlite3.Connection:
    """A connection that holds the exclusive lock of ``path``; closing it gives the lock back."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.unlink()  # nothing that leads elsewhere; a folder raises what it raises
    connection = sqlite3.connect(path, timeout=timeout, isolation_level=None)
    try:
        # In memory: a journal file left by a crash would have to be looked after.
        connection.execute("PRAGMA journal_mode = MEMORY")
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.DatabaseError as error:
        connection.close()
        if type(error) is sqlite3.DatabaseError:  # not a database: put there by somebody else
            with suppress(OSError):
                path.unlink()
            raise sqlite3.OperationalError(f"the lock file was foreign ({error})") from error
        raise
    return connection
