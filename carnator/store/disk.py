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
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from diskcache import UNKNOWN, Disk  # type: ignore[import-untyped]
from diskcache.core import MODE_BINARY, MODE_RAW

CHUNK = 1 << 22  # bytes per write
INT64 = 1 << 63
# What diskcache's own Disk.filename makes; anything else in a row could point out of the folder.
FILE_NAME = re.compile(r"[0-9a-f]{2}[/\\][0-9a-f]{2}[/\\][0-9a-f]{28}\.val")


class UnsafeRow(Exception):
    """A row that this package cannot have written: pickle, a foreign mode, a path trick."""


class PlainDisk(Disk):  # type: ignore[misc]
    """Keys are str; values are bytes, str, int, float, or a binary stream (``read=True``)."""

    def __init__(self, directory: str, min_file_size: int = 0, **_ignored: Any) -> None:
        """``min_file_size``: bytes from which a value goes to a file of its own.

        Further ``disk_*`` settings (the pickle protocol is one) come from diskcache's defaults or
        from the settings table, and mean nothing here.
        """
        super().__init__(directory, min_file_size=min_file_size)

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

    def store(self, value: Any, read: bool, key: Any = UNKNOWN) -> tuple[int, int, str | None, Any]:
        """Value to ``(size, mode, file name, database value)``. TypeError without a plain form."""
        if read:
            if not callable(getattr(value, "read", None)):
                raise TypeError(f"A stream must have read(), {type(value).__name__} has not.")
            return self._to_file(iter(lambda: value.read(CHUNK), b""), key)
        # Exact types: a bool or a subclass would come back as something else.
        if type(value) is str or type(value) is bytes:
            if len(value) < self.min_file_size:
                return 0, MODE_RAW, None, value
            if type(value) is bytes:
                return self._to_file(iter([value]), key)
        elif _is_plain_number(value):
            return 0, MODE_RAW, None, value
        raise TypeError(
            f"A store value must be bytes, short str, 64-bit int, finite float or a binary stream, "
            f"not {type(value).__name__}."
        )

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> Any:
        """Row to value; with ``read`` an open binary file for a value kept in a file.

        UnsafeRow for every mode this class does not write, pickle before all. OSError if the file
        cannot be opened.
        """
        if mode == MODE_RAW and type(value) in (bytes, str, int, float):
            return value
        if mode == MODE_BINARY:
            stream = open(self.path(filename), "rb")  # noqa: SIM115 - handed to the caller
            if read:
                return stream
            with stream:
                return stream.read()
        raise UnsafeRow(f"a row has storage mode {mode!r}, which this store never writes")

    def remove(self, file_path: Any) -> None:
        """Delete a value's file and the sub-folders it leaves empty; never the store folder."""
        with suppress(UnsafeRow, OSError):
            path = self.path(file_path)
            path.unlink()
            path.parent.rmdir()
            path.parent.parent.rmdir()

    def path(self, filename: Any) -> Path:
        """Full path of a value file. UnsafeRow if the name is not ours or leads elsewhere."""
        if type(filename) is not str or not FILE_NAME.fullmatch(filename):
            raise UnsafeRow(f"a row names the file {filename!r}, which this store never writes")
        root = os.path.realpath(self._directory)
        path = os.path.join(root, filename)
        if os.path.realpath(path) != os.path.normpath(path):
            raise UnsafeRow(f"the file {filename!r} is reached through a link")
        return Path(path)

    def _to_file(self, chunks: Iterator[Any], key: Any) -> tuple[int, int, str, None]:
        filename, full_path = self.filename(key)
        return self._write(full_path, chunks, "xb"), MODE_BINARY, filename, None

    def _write(
        self, full_path: str, iterator: Iterable[Any], mode: str, encoding: str | None = None
    ) -> int:
        """Write, flush to the device, return the size. A failed write leaves nothing behind."""
        writer = self._create(Path(full_path))
        complete = False
        try:
            with writer:
                size = sum(writer.write(chunk) for chunk in iterator)
                writer.flush()
                # A row must never point at bytes that a power cut can still take away.
                os.fsync(writer.fileno())
            complete = True
            return size
        finally:
            if not complete:
                with suppress(OSError):
                    os.unlink(full_path)

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
