"""What a person does with a store: look at the records, keep some, let others go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from . import transfer
from .cards import Card, card, matches
from .commit import Limits, clear, evict, pin
from .database import TROUBLE
from .errors import RecordError, StoreError
from .header import read_tensors
from .index import Index
from .preview import PREVIEW, picture
from .reading import Reader
from .rebuild import rebuild
from .record import is_record_id
from .value import Usage
from .writer import Writer

T = TypeVar("T")


class Care:
    """The part of a Store that people and their tools use; raises StoreError, but where it says
    otherwise."""

    folder: Path
    disk_floor: int
    _index: Index
    _writer: Writer
    _reader: Reader
    _trouble: Callable[[str, Exception], None]

    @property
    def limits(self) -> Limits:
        raise NotImplementedError

    def changes(self) -> int:
        """A number that is another one after every change that a person can see, by any process;
        0 if the store cannot be read (logged)."""
        try:
            return sum(self._index.open().changes())
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot be read", error)
            return 0

    def cards(self, search: str = "", start: int = 0, count: int | None = None) -> list[Card]:
        """Records as shown to a person, newest first: those with all words of ``search``, and of
        them ``count`` from the ``start``th on. Empty if the store cannot be read (logged)."""
        words = search.casefold().split()
        try:
            usage, pinned = self._index.usage(), self._index.pinned()
            entries = self._index.entries()
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot be listed", error)
            return []
        if not words:
            entries = entries[start:] if count is None else entries[start : start + count]
        shown = [card(e, usage.get(e.id, Usage()), e.id in pinned) for e in entries]
        if not words:
            return shown
        found = [one for one in shown if matches(one, words)]
        return found[start:] if count is None else found[start : start + count]

    def preview(self, id: str) -> np.ndarray | None:
        """A few small frames of a record's clip, uint8 [frames, height, width, 3]; None if it has
        none or cannot be read (logged)."""
        try:
            with self._reader.reading(id) as (stream, header):
                if PREVIEW not in header.names:
                    return None
                return picture(read_tensors(stream, header, [PREVIEW])[PREVIEW])
        except RecordError:
            return None

    def pin(self, *ids: str) -> int:
        """Keep records whatever they are worth; returns how many of them there are."""
        return self._asked("pinned", pin, self._index, _valid(ids), True)

    def unpin(self, *ids: str) -> int:
        """Let them be evicted again; returns how many of them there are."""
        return self._asked("unpinned", pin, self._index, _valid(ids), False)

    def delete(self, id: str) -> bool:
        """Delete a record; False if there was none or it cannot be deleted (logged)."""
        try:
            return is_record_id(id) and self._index.erase([id]) > 0
        except (StoreError, *TROUBLE) as error:
            self._trouble("cannot delete a record", error)
            return False

    def clear(self) -> None:
        """Delete everything, pinned or not, also what waits to be written."""
        self._writer.discard()
        self._writer.flush()
        self._asked("cleared", clear, self._index)

    def prune(self, size: int | None = None) -> int:
        """Evict what is worth least until the records take no more than ``size`` bytes (the
        store's limit, if None); returns how many went."""
        limits = self.limits if size is None else Limits(size, self.disk_floor)
        return self._asked("pruned", evict, self._index, limits)

    def rebuild(self) -> int:
        """Make the index agree with the payload files: adopt whole ones that lack a row, delete
        broken ones; returns how many were adopted. Happens by itself when the index was lost."""

        def work() -> int:
            with self._index.writing() as cache:
                return rebuild(cache, self._index.root)

        return self._asked("rebuilt", work)

    def verify(self) -> Iterator[tuple[str, str]]:
        """Read every record whole; yields (id, what was wrong with it or ""). Bad ones are
        dropped."""
        for entry in self._asked("verified", self._index.entries):
            try:
                with self._reader.reading(entry.id) as (stream, header):
                    for name in header.names:  # one at a time: little memory
                        read_tensors(stream, header, [name])
            except RecordError as error:
                yield entry.id, str(error)
            else:
                yield entry.id, ""

    def export(self, path: Path | str, ids: Sequence[str] | None = None) -> int:
        """Write records (all of them, if None) to one new file; returns how many. RecordError if
        one of ``ids`` cannot be read."""
        chosen = (
            [e.id for e in self._asked("exported", self._index.entries)] if ids is None else ids
        )
        return transfer.export(Path(path), chosen, self._reader.reading)

    def import_file(self, path: Path | str) -> transfer.Imported:
        """Take in the records of an exported file, which may come from anybody: each is checked
        whole, and written anew. Those that are here already are left out."""
        return self._asked("filled", transfer.import_file, Path(path), self._index, self.limits)

    def _asked(self, done: str, work: Callable[..., T], *args: Any) -> T:
        try:
            return work(*args)
        except TROUBLE as error:
            self._index.heal(error)
            raise StoreError(f"The store {self.folder} cannot be {done}: {error}.") from error


def _valid(ids: Sequence[str]) -> list[str]:
    return [record_id for record_id in ids if is_record_id(record_id)]
