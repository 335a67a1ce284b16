"""A store's life in fast motion: two openers, every operation, damage and clock jumps between."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from records import payloads

from carnator.store import Draft, RecordError, Store, StoreError
from carnator.store.folder import SUBFOLDER
from carnator.store.index import ENTRIES_KEPT
from carnator.store.schema import discard_database

STEPS = 500
LIMIT = 200_000


class Soak:
    """Two stores on one folder, and what they must hold: the last value put per request."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.stores = [Store(folder, LIMIT, disk_floor=0) for _ in range(2)]
        self.put_last: dict[tuple[str, str], float] = {}
        self.pinned: set[str] = set()
        self.counter = 0.0
        self.hits = 0

    @property
    def store(self) -> Store:
        return self.rng.choice(self.stores)

    def some(self) -> str | None:
        ids = [entry.id for entry in self.store.entries()]
        return self.rng.choice(ids) if ids else None

    def draft(self) -> Draft:
        self.counter += 1
        tensors = {"v": torch.full((self.rng.randint(1, 9000),), self.counter)}
        partition, identity = self.rng.choice(["aa", "bb"]), f"{self.rng.randrange(14):02x}"
        meta = {"seconds": self.rng.uniform(0.1, 9), "label": "soak"}
        signature = np.array([self.counter % 7] * 5, np.float16)
        return Draft(partition, identity, meta, tensors, signature)

    def put(self) -> None:
        draft, store = self.draft(), self.store
        try:
            if self.rng.random() < 0.7:
                made = store.put(draft)
                assert made in {entry.id for entry in self.store.entries(draft.partition)}
                replaced = self.pinned - {entry.id for entry in self.store.entries()}
                self.pinned = self.pinned - replaced | ({made} if replaced else set())
            else:
                store.submit(draft)
                assert store.flush(60)
                self.pinned = {card.id for card in store.cards() if card.pinned}
        except StoreError as error:
            assert "pinned records" in str(error)
            return
        self.put_last[draft.partition, draft.identity] = self.counter

    def read(self) -> None:
        record_id = self.some()
        if record_id is not None:
            self.check(self.store, record_id)

    def check(self, store: Store, record_id: str) -> None:
        entry = store.entry(record_id)
        assert entry is not None
        value = store.read(record_id, ["v"])["v"]
        wanted = self.put_last[entry.partition, entry.identity]
        assert bool((value == wanted).all()), "not what was put last for this request"

    def search(self) -> None:
        store = self.store
        for partition in ("aa", "bb"):
            shelf = store.shelf(partition)
            there = {entry.id for entry in store.entries(partition)}
            assert set(shelf.nearest(np.zeros(5, np.float16), 99)) == there

    def hit(self) -> None:
        store, record_id = self.store, self.some()
        store.note_hit(record_id or "0" * 32, self.rng.uniform(0, 5))
        assert store.flush(60)

    def pin(self) -> None:
        record_id = self.some()
        if record_id is not None and len(self.pinned) < 3:
            assert self.store.pin(record_id) == 1
            self.pinned.add(record_id)

    def unpin(self) -> None:
        for record_id in list(self.pinned)[:1]:
            assert self.store.unpin(record_id) == 1
            self.pinned.discard(record_id)

    def delete(self) -> None:
        record_id = self.some()
        if record_id is not None:
            assert self.store.delete(record_id)
            self.pinned.discard(record_id)

    def prune(self) -> None:
        if not self.pinned:
            self.store.prune(LIMIT // 2)
            assert self.store.stats().bytes <= LIMIT // 2

    def reopen(self) -> None:
        self.stores.pop(self.rng.randrange(2)).close()
        self.stores.append(Store(self.folder, LIMIT, disk_floor=0))

    def relax(self) -> None:
        self.store.relax()

    def damage_index(self) -> None:
        database = self.folder / SUBFOLDER / "cache.db"
        if self.rng.random() < 0.5:
            discard_database(database.parent)
        else:
            self.store._index.open()._sql("PRAGMA wal_checkpoint(TRUNCATE)")
            discard_database(database.parent)
            database.write_bytes(b"no database" * 1000)

    def damage_record(self) -> None:
        record_id = self.some()
        if record_id is None:
            return
        name = self.store._index.open().payload_name(record_id)
        path = self.folder / SUBFOLDER / name
        data = path.read_bytes()
        if self.rng.random() < 0.5:
            path.unlink()
        else:
            path.write_bytes(data[:-2] + bytes([data[-2] ^ 8]) + data[-1:])
        with pytest.raises(RecordError):
            self.store.read(record_id, ["v"])
        self.pinned.discard(record_id)

    def carry(self) -> None:
        file = self.folder / "carried"
        file.unlink(missing_ok=True)
        store = self.store
        written = store.export(file)
        assert store.import_file(file).known == written

    def clear(self) -> None:
        if self.rng.random() < 0.2:
            self.store.clear()
            self.pinned.clear()
            assert payloads(self.folder) == []

    def jump(self, monkeypatch: pytest.MonkeyPatch) -> None:
        moved = self.rng.choice([0, 1e6, -1e6, 4e8, -1e9])
        monkeypatch.setattr(time, "time", lambda: 1.7e9 + moved)

    def invariants(self) -> None:
        one, two = ([entry.id for entry in store.entries()] for store in self.stores)
        assert one == two, "both see the same"
        assert self.pinned <= set(one)
        assert {card.id for card in self.stores[0].cards() if card.pinned} == self.pinned
        stats = self.stores[1].stats()
        assert stats.records == len(one) and stats.bytes <= LIMIT
        sizes = [path.stat().st_size for path in payloads(self.folder)]
        assert len(sizes) == len(one) and sum(sizes) <= stats.bytes
        requests = [(e.partition, e.identity) for e in self.stores[0].entries()]
        assert len(requests) == len(set(requests)), "one record per request"
        for store in self.stores:
            assert len(store._index._entries) <= ENTRIES_KEPT


def test_a_long_life(tmp_path: Path, monkeypatch) -> None:
    rng = random.Random(21)
    soak = Soak(tmp_path, rng)
    usual = [soak.put] * 8 + [soak.read] * 6 + [soak.hit] * 3 + [soak.search] * 2
    usual += [soak.pin, soak.unpin, soak.delete, soak.reopen, soak.relax, soak.prune, soak.carry]
    usual += [soak.damage_index, soak.damage_record, soak.clear, lambda: soak.jump(monkeypatch)]
    done: dict[str, int] = {}
    for _ in range(STEPS):
        work = rng.choice(usual)
        work()
        done[getattr(work, "__name__", "")] = done.get(getattr(work, "__name__", ""), 0) + 1
        soak.invariants()
    assert len(done) == len({getattr(w, "__name__", "") for w in usual}), "all were tried"
    for store in soak.stores:
        for entry in store.entries():
            soak.check(store, entry.id)
        assert store.rebuild() == 0
        store.close()
