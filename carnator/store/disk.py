"""A diskcache ``Disk`` that can neither write nor read pickle.

diskcache pickles any key or value it has no plain form for, and unpickles what it finds
(CVE-2025-69872; no fixed release). Every method here that turns Python values into rows, or rows
into Python values, therefore replaces the original and calls none of it. What stands in the
folder is untrusted input: modes and file names are checked before they are used.
"""

from __future__ import annotations

import math
import os
import re
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from diskcache import UNKNOWN, Disk  # type: ignore[import-untyped]
from diskcache.core import MODE_BINARY, MODE_RAW

CHUNK = 1 << 22  # bytes per write
INT64 = 1 << 63
# What diskcache's own Disk.filename makes; anything else in a row could point out of the folder.
FILE_NAME = re.compile(r"[0-9a-f]{2}[/\\][0-9a-f]{2}[/\\][0-9a-f]{28}\.val")
# A planted pipe must not block the open, nor a link lead out of the folder.
READ_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


# Windows' other kind of link (Python 3.12 and newer can tell).
is_junction = getattr(os.path, "isjunction", lambda _: False)


class UnsafeRow(Exception):
    """A row that this package cannot have written: pickle, a foreign mode, a path trick."""


def open_plain(path: Path | str) -> BinaryIO:
    """Open a file for reading if it is a plain one. UnsafeRow if not, OSError if that fails."""
    descriptor = os.open(path, READ_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeRow(f"{os.path.basename(path)} is not a plain file")
    return open(descriptor, "rb")


class Source(Protocol):
    """Where a payload's bytes come from, at most ``size`` at a time; nothing at the end."""

    def read(self, size: int, /) -> Any: ...


class PlainDisk(Disk):  # type: ignore[misc]
    """Keys are str; values are short bytes, str, int or float. Payload files stand apart."""

    def __init__(self, directory: str, min_file_size: int = 0, **_ignored: Any) -> None:
        """``min_file_size``: bytes from which a value is refused, being no index row.

        Further ``disk_*`` settings (the pickle protocol is one) come from diskcache's defaults or
        from the settings table, and mean nothing here.
        """
        super().__init__(directory, min_file_size=min_file_size)
        self._root = os.path.realpath(directory)

    def hash(self, key: Any) -> int:
        """Portable 32-bit hash of a str key."""
        return zlib.adler32(self.put(key)[0].encode("utf-8")) & 0xFFFFFFFF

    def put(self, key: Any) -> tuple[str, bool]:
        """Key to its database form. TypeError for anything but str."""
        if type(key) is not str:
            raise TypeError(f"A store key must be str, not {type(key).__name__}.")
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        """Database form to key. UnsafeRow for a pickled or otherwise foreign key."""
        if raw not in (True, 1) or type(key) is not str:
            raise UnsafeRow("a row's key is not plain text; it may be pickled")
        return key

    def store(self, value: Any, read: bool, key: Any = UNKNOWN) -> tuple[int, int, None, Any]:
        """Value to ``(size, mode, file name, database value)``. TypeError without a plain form."""
        # Exact types: a bool or a subclass would come back as something else.
        short = type(value) in (str, bytes) and len(value) < self.min_file_size
        if not read and (short or _is_plain_number(value)):
            return 0, MODE_RAW, None, value
        raise TypeError(
            "A store value must be short bytes or str, a 64-bit int or a finite float, "
            f"not {'a stream' if read else type(value).__name__}."
        )

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> Any:
        """Row to value; with ``read`` an open binary file for a value kept in a file.

        UnsafeRow for every mode this class does not write, pickle before all. OSError if the file
        cannot be opened.
        """
        if mode == MODE_RAW and type(value) in (bytes, str, int, float):
            return value
        if mode == MODE_BINARY and read:
            return open_plain(self._locate(filename))
        raise UnsafeRow(f"a row has storage mode {mode!r}, which this store never writes")

    def remove(self, file_path: Any) -> bool:
        """Delete a payload file and the sub-folders it leaves empty, never the store folder.
        False if the file is still there."""
        try:
            path = self.path(file_path)
        except UnsafeRow:
            return True  # not ours, wherever it leads
        try:
            path.unlink()
        except FileNotFoundError:
            pass
        except OSError:
            return False
        with suppress(OSError):
            path.parent.rmdir()
            path.parent.parent.rmdir()
        return True

    def path(self, filename: Any) -> Path:
        """Full path of a payload file. UnsafeRow if the name is not ours or leads elsewhere."""
        return Path(self._locate(filename))

    def _locate(self, filename: Any) -> str:
        if type(filename) is not str or not FILE_NAME.fullmatch(filename):
            raise UnsafeRow(f"a row names the file {filename!r}, which this store never writes")
        # Of known form: two folders of two characters, and the file.
        outer = f"{self._root}{os.sep}{filename[:2]}"
        inner = f"{outer}{os.sep}{filename[3:5]}"
        path = f"{inner}{os.sep}{filename[6:]}"
        for part in (outer, inner, path):
            if os.path.islink(part) or is_junction(part):
                raise UnsafeRow(f"the file {filename!r} is reached through a link")
        return path

    def write(self, filename: str, source: Source) -> int:
        """Write a new payload file, flush it to the device, return its size. A failed write leaves
        nothing behind."""
        path = self.path(filename)
        writer, complete, size = self._create(path), False, 0
        try:
            with writer:
                while chunk := source.read(CHUNK):
                    size += writer.write(chunk)
                writer.flush()
                # A row must never point at bytes that a power cut can still take away.
                os.fsync(writer.fileno())
            complete = True
            return size
        finally:
            if not complete:
                with suppress(OSError):
                    path.unlink()

    @staticmethod
    def _create(path: Path) -> BinaryIO:
        """Open a new file; another process may remove the still empty sub-folder in between."""
        for last in (False, False, False, True):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                return open(path, "xb")
            except FileNotFoundError:
                if last:
                    raise
        raise AssertionError("unreachable")


def _is_plain_number(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)  # sqlite would turn NaN into NULL
    return type(value) is int and -INT64 <= value < INT64
