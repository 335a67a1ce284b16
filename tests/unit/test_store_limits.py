"""What goes and what stays: the byte limit, pins, the disk's floor, a full disk, the clock."""

from __future__ import annotations

import errno
import logging
import os
import random
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from records import payloads, plain

from carnator.store import Draft, RecordError, Store, StoreError, commit
from carnator.store.commit import MIB
from carnator.store.database import SafeCache
from carnator.store.disk import PlainDisk
from carnator.store.schema import discard_database


def big(identity: str, **meta: object) -> Draft:
    """A record of 40,000 bytes and a little."""
    tensors = {"t": torch.full((10_000,), 1.5)}
    return Draft("aa", identity, {"seconds": 1.0, **meta}, tensors, np.ones(3, np.float16))


ROOM = 45_000  # bytes for one of them


def kept(store: Store) -> set[str]:
    return {entry.identity for entry in store.entries()}


def test_the_limit_holds_at_every_write(tmp_path: Path, monkeypatch) -> None:
    limit, seen = 3 * ROOM, []
    write = PlainDisk.write

    def spy(self, filename, source):
        size = write(self, filename, source)
        seen.append(sum(path.stat().st_size for path in payloads(tmp_path)))
        return size

    monkeypatch.setattr(PlainDisk, "write", spy)
    with Store(tmp_path, limit) as store:
        for i in range(8):
            store.put(big(f"{i:02x}"))
            assert store.stats().bytes <= limit
        assert len(store.entries()) == 3
    assert len(seen) == 8
    assert max(seen) <= limit, "room is made before a record is written"


def test_pinned_records_are_never_evicted(tmp_path: Path) -> None:
    with Store(tmp_path, 3 * ROOM) as store:
        first = store.put(big("01", seconds=0.001))
        assert store.pin(first, "0" * 32, "nonsense") == 1
        for i in range(2, 7):
            store.put(big(f"{i:02x}"))
        assert "01" in kept(store)
        last = store.put(big("aa"))
        assert store.pin(*(e.id for e in store.entries())) == 3
        with pytest.raises(StoreError, match="pinned records .* leave no room .* raise the limit"):
            store.put(big("bb"))
        assert len(store.entries()) == len(payloads(tmp_path)) == 3, "nothing went for nothing"
        assert store.unpin(last) == 1
        store.put(big("cc"))
        assert kept(store) >= {"01", "cc"} and "aa" not in kept(store)


def test_a_record_that_takes_anothers_place_inherits_its_pin_and_its_use(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.pin(store.put(big("01")))
        store.note_hit(store.entries()[0].id, 3.0)
        store.flush()
        new = store.put(big("01"))
        (card,) = store.cards()
        assert (card.id, card.pinned, card.hits, card.seconds_saved) == (new, True, 1, 3.0)
        assert len(payloads(tmp_path)) == 1
        discard_database(store._index.root)
        assert [card.pinned for card in store.cards()] == [True], "as it is beside the index"


def test_a_lower_limit_is_kept_from_the_next_record_on_or_by_pruning(tmp_path: Path) -> None:
    with Store(tmp_path, 10 * ROOM) as store:
        for i in range(6):
            store.put(big(f"{i:02x}"))
        assert store.prune() == 0
        assert store.prune(4 * ROOM) == 2
        store.size_limit = 2 * ROOM
        store.put(big("aa"))
        assert len(store.entries()) == 2 and "aa" in kept(store)
        store.pin(*(e.id for e in store.entries()))
        with pytest.raises(StoreError, match="leave no room"):
            store.prune(ROOM)
    with Store(tmp_path) as store:
        assert store.size_limit == 2 * ROOM, "the last limit is remembered"


def test_the_number_of_records_is_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(commit, "MOST_RECORDS", 5)
    with Store(tmp_path) as store:
        for i in range(9):
            store.put(plain(f"{i:02x}"))
        assert len(store.entries()) == 5 and "08" in kept(store)


def test_the_disks_floor_is_left_free(tmp_path: Path, monkeypatch) -> None:
    """A disk that others fill: records go for it, and none is written where none fits."""
    others = 0

    def free(_: Path) -> int:
        return 10 * ROOM - others - sum(path.stat().st_size for path in payloads(tmp_path))

    monkeypatch.setattr(commit, "free_bytes", free)
    with Store(tmp_path, disk_floor=4 * ROOM) as store:
        for i in range(12):
            store.put(big(f"{i:02x}"))
            assert free(tmp_path) >= 4 * ROOM
        assert len(store.entries()) in (5, 6)
        others = 7 * ROOM
        with pytest.raises(StoreError, match="MiB left.* make room on the disk"):
            store.put(big("aa"))
        assert len(store.entries()) >= 5, "nothing went for nothing"


def test_free_space_that_cannot_be_told_stops_nothing(tmp_path: Path) -> None:
    assert commit.free_bytes(tmp_path) > 0
    assert commit.free_bytes(tmp_path / "nowhere") > 1000 * MIB


FULL = OSError(errno.ENOSPC, "No space left on device")


class FullDisk:
    """Fails the ``at``th call of those that write, counting file and database alike."""

    def __init__(self, monkeypatch) -> None:
        self.at = self.calls = 0
        fsync, create, row = os.fsync, PlainDisk._create, SafeCache.set
        rows, settle, adopt = SafeCache.hide, SafeCache.settle, SafeCache.adopt
        monkeypatch.setattr(os, "fsync", lambda f: self.count(FULL) or fsync(f))
        monkeypatch.setattr(
            PlainDisk, "_create", staticmethod(lambda path: self.stream(create(path)))
        )
        for name, original in (("set", row), ("hide", rows), ("settle", settle), ("adopt", adopt)):
            monkeypatch.setattr(SafeCache, name, self.failing(original))

    def failing(self, original):
        def call(cache, *args, **named):
            self.count(sqlite3.OperationalError("database or disk is full"))
            return original(cache, *args, **named)

        return call

    def count(self, error: Exception) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise error

    def stream(self, file):
        write = file.write

        class Stream:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                file.close()

            def __getattr__(self, name):
                return getattr(file, name)

        stream = Stream()
        stream.write = lambda data: (write(data[:7]), self.count(FULL), write(data[7:]))[2] + 7
        return stream


def test_a_full_disk_at_each_write_loses_the_new_record_alone(tmp_path: Path, monkeypatch) -> None:
    with Store(tmp_path, 5 * ROOM, disk_floor=0) as store:
        for identity in ("01", "02", "03"):
            store.put(big(identity))
        disk = FullDisk(monkeypatch)
        failed = 0
        for disk.at in range(1, 40):
            disk.calls = 0
            try:
                store.put(big("02"))  # takes the place of the one before
            except StoreError as error:
                failed += 1
                assert "full" in str(error) or "No space" in str(error)
            assert kept(store) == {"01", "02", "03"}
            for entry in store.entries():
                assert bool((store.read(entry.id, ["t"])["t"] == 1.5).all())
            assert len(payloads(tmp_path)) <= 4
        assert failed > 8, "the disk was hardly ever full"
        disk.at = 0
        store.put(big("04"))
        assert len(payloads(tmp_path)) == len(store.entries()) == 4


def test_a_full_disk_never_reaches_a_generation(tmp_path: Path, monkeypatch, caplog) -> None:
    with Store(tmp_path, disk_floor=0) as store:
        known = store.put(big("01"))
        disk = FullDisk(monkeypatch)
        for disk.at in range(1, 30):
            disk.calls = 0
            with caplog.at_level(logging.CRITICAL):
                store.submit(big("02"))
                store.note_hit(known, 1.0)
                assert store.flush(20)
                assert store.claim(f"name{disk.at}", "me") == "me"
            assert "01" in kept(store)
            assert len(store.read(known, ["t"])) == 1


def test_a_clock_that_jumps_loses_and_evicts_nothing_it_should_not(
    tmp_path: Path, monkeypatch
) -> None:
    rng = random.Random(3)
    monkeypatch.setattr(time, "time", lambda: rng.choice([0.0, 1e9, 1.7e9, 4e9, 1e11]))
    with Store(tmp_path, 4 * ROOM) as store:
        precious = store.put(big("ff", seconds=1000.0))
        store.pin(precious)
        for i in range(30):
            store.put(big(f"{i % 6:02x}"))
            store.note_hit(precious, 1.0)
            store.flush()
            assert f"{i % 6:02x}" in kept(store), "the record just written"
            assert "ff" in kept(store)
            assert len(store.entries()) == len(kept(store)), "one per request, whatever the time"
        assert store.rebuild() == 0
        assert store.stats().hits == 30
        discard_database(store._index.root)
        assert "ff" in kept(store)
        assert [card.pinned for card in store.cards() if card.id == precious] == [True]


def test_two_versions_of_the_format_share_a_folder(tmp_path: Path) -> None:
    older = tmp_path / "carnator-v1" / "aa" / "bb"
    older.mkdir(parents=True)
    (older / f"{'0' * 28}.val").write_bytes(b"theirs")
    with Store(tmp_path, 2 * ROOM) as store:
        for i in range(4):
            store.put(big(f"{i:02x}"))
        store.rebuild()
        store.clear()
    assert [path.read_bytes() for path in payloads(tmp_path)] == [b"theirs"]


def test_a_deleted_record_is_gone_without_a_word(tmp_path: Path, caplog) -> None:
    with Store(tmp_path) as one, Store(tmp_path) as two, caplog.at_level(logging.WARNING):
        record_id = one.put(big("01"))
        assert len(two.read(record_id, ["t"])) == 1
        one.delete(record_id)
        with pytest.raises(RecordError, match="no longer"):
            two.read(record_id, ["t"])
        assert caplog.records == []
