"""Records come, and others go to make room for them. All of it under the writer's lock."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .brief import brief_of
from .database import TROUBLE, SafeCache
from .disk import UnsafeRow
from .errors import StoreError
from .index import Index
from .payload import Payload
from .rebuild import finish, rebuild, reveal, save_pins
from .record import dumps
from .schema import payload_files_on_disk
from .value import Usage, victims

MIB = 2**20
MOST_RECORDS = 50_000  # what the index and the memory it takes are made for


@dataclass(frozen=True)
class Limits:
    """``size``: bytes the store may take. ``floor``: bytes it leaves free on the disk."""

    size: int
    floor: int


def commit(index: Index, payload: Payload, limits: Limits, *, make_room: bool = True) -> None:
    """Make room (where others may go for it), write a record, and let it take the place of older
    ones of the same request.

    At no instant does the store take more than its limit, and at none is a record lost but the
    one being written: its row is there before its file, invisible until the file is complete.
    StoreError if there can be no room.
    """
    entry = payload.entry
    need = brief_of(entry).nbytes
    with index.writing() as cache:
        finish(cache, index.root)
        older = cache.same_request(entry.partition, entry.identity)
        _make_room(index, cache, limits, need=need, replaced=older, may_evict=make_room)
        filename = cache.reserve(entry.id, need)
        complete = False
        try:
            cache.disk.write(filename, payload)
            if index.pinned() & set(older):
                save_pins(cache, index.root, entry.id)
            with cache.change():
                # The older ones may have gone to make room.
                _inherit(cache, entry.id, [i for i in older if cache.small(f"entry:{i}")])
                reveal(cache, entry)
                cache.hide(older)
                cache.set("limit", dumps(limits.size).encode("ascii"))
            complete = True
        finally:
            if not complete:
                cache.remove_file(filename)  # first: on a full disk it makes room for the rest
                with suppress(*TROUBLE, StoreError):
                    index.erase([entry.id])
        cache.forget(older)


def evict(index: Index, limits: Limits) -> int:
    """Come under the limits; returns how many records went. StoreError if pinned ones do not
    allow it."""
    with index.writing() as cache:
        finish(cache, index.root)
        return _make_room(index, cache, limits)


def clear(index: Index) -> None:
    """Delete every record, every count and every claim."""
    with index.writing() as cache:
        index.relax()
        index.erase(cache.ids())
        finish(cache, index.root)
        with cache.change():
            cache.delete("totals")
            cache.trim("claim", 0)
        for name in payload_files_on_disk(index.root):
            cache.remove_file(name)
        rebuild(cache, index.root)  # rows of files just deleted
        save_pins(cache, index.root)


def pin(index: Index, record_ids: Iterable[str], pinned: bool) -> int:
    """Pin records, or unpin them; returns how many of them there are."""
    with index.writing() as cache:
        with cache.change(records=False):
            found = [i for i in record_ids if cache.small(f"entry:{i}") is not None]
            for record_id in found:
                if pinned:
                    cache.set(f"pin:{record_id}", b"1")
                else:
                    cache.delete(f"pin:{record_id}")
        save_pins(cache, index.root)
    return len(found)


def free_bytes(root: Path) -> int:
    """Bytes left on the disk of a folder; plenty where that cannot be told."""
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return 1 << 62


def _make_room(
    index: Index,
    cache: SafeCache,
    limits: Limits,
    *,
    need: int = 0,
    replaced: Collection[str] = (),
    may_evict: bool = True,
) -> int:
    """Evict until ``need`` more bytes fit; returns how many records went. Which ones is decided in
    ``value.py``. StoreError if there cannot be room; for a record that does not fit none goes."""
    over = cache.volume_bytes() + need - limits.size
    short = limits.floor + need - free_bytes(index.root)
    surplus = cache.tally("entry") + (need > 0) - MOST_RECORDS
    if max(over, short, surplus) <= 0:
        return 0
    if not may_evict:
        raise StoreError(_refusal(index, limits, short > over, "records"))
    # One pass, by what the records take: a file that a reader holds open frees nothing yet, and
    # must not make all others go.
    briefs, pinned, now = index.briefs(), index.pinned(), time.time()
    sizes = {brief.id: brief.nbytes for brief in briefs}
    chosen = victims(
        briefs,
        index.usage(),
        now,
        excess=max(over, short),
        number=surplus,
        keep=pinned,
        first=replaced,
    )
    freed = sum(sizes[record_id] for record_id in chosen)
    fits = freed >= max(over, short) and len(chosen) >= surplus
    if fits or not need:
        index.erase(chosen)
    if not fits:
        raise StoreError(_refusal(index, limits, short > max(over, freed), "pinned records"))
    return len(chosen)


def _refusal(index: Index, limits: Limits, disk: bool, what: str) -> str:
    if disk:
        return (
            f"The disk of {index.folder} has {free_bytes(index.root) / MIB:.0f} MiB left, and the "
            f"store leaves {limits.floor / MIB:.0f} MiB free; make room on the disk."
        )
    return (
        f"The {what} of {index.folder} leave no room under the limit of "
        f"{limits.size / MIB:.1f} MiB; let some go, or raise the limit."
    )


def _inherit(cache: SafeCache, record_id: str, older: list[str]) -> None:
    """Hand on what counts for the request rather than the record: use, and being pinned."""
    for old in older:
        for kind in ("use", "pin"):
            try:
                row = cache.small(f"{kind}:{old}")
            except UnsafeRow:
                continue
            if row is not None:
                cache.set(f"{kind}:{record_id}", Usage.unpack(row).pack() if kind == "use" else row)
