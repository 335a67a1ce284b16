"""The store in ordinary use: put, find, read in part, count, delete."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from records import make, payloads
from safetensors import safe_open

from carnator.store import Draft, RecordError, Store, StoreError
from carnator.store.disk import PlainDisk


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "store") as opened:
        yield opened


def test_round_trip(store: Store) -> None:
    draft = make(labels={"prompt": "un carré é"})
    before = {name: tensor.clone() for name, tensor in draft.tensors.items()}
    record_id = store.put(draft)
    (entry,) = store.entries("aa")
    assert (entry.id, entry.partition, entry.identity) == (record_id, "aa", "01")
    assert entry.meta == draft.meta
    assert entry.signature.dtype == np.float16
    assert np.array_equal(entry.signature, draft.signature)
    (path,) = payloads(store.folder)
    assert entry.nbytes == path.stat().st_size
    tensors = store.read(record_id, list(before))
    for name, tensor in before.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


def test_non_contiguous_and_shared_tensors(store: Store) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    draft = Draft("aa", "01", {}, {"t": base.T, "again": base}, np.empty(0, np.float16))
    tensors = store.read(store.put(draft), ["t", "again"])
    assert torch.equal(tensors["t"], base.T)
    assert torch.equal(tensors["again"], base)
    assert store.entries()[0].signature.shape == (0,)


def test_payload_is_a_safetensors_file(store: Store) -> None:
    draft = make()
    store.put(draft)
    with safe_open(str(payloads(store.folder)[0]), "pt") as file:
        assert set(file.keys()) == set(draft.tensors)
        assert list(file.metadata()) == ["carnator"]
        for name, tensor in draft.tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_partial_read_touches_only_what_is_asked_for(store: Store, monkeypatch) -> None:
    record_id = store.put(make(size=200_000))
    index, ranges = store._index, []
    original = index.open().open_payload

    class Spy:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.stream.close()

        def __getattr__(self, name):
            return getattr(self.stream, name)

        def read(self, size):
            ranges.append(size)
            return self.stream.read(size)

        def readinto(self, buffer):
            ranges.append(len(buffer))
            return self.stream.readinto(buffer)

    monkeypatch.setattr(index.open(), "open_payload", lambda i: Spy(original(i)))
    store.read(record_id, ["half"])
    assert ranges[-1] == 2 * 3 * 4 * 2
    assert sum(ranges) < 5_000 < 4 * 200_000


def test_entries_by_partition_and_order(store: Store) -> None:
    ids = [store.put(make("aa" if i % 2 else "bb", f"{i:02x}")) for i in range(6)]
    assert [e.id for e in store.entries()] == ids[::-1]
    assert [e.id for e in store.entries("aa")] == ids[5::-2]
    assert store.entries("cc") == []


def test_same_request_replaces_its_record(store: Store) -> None:
    first = store.put(make())
    other = store.put(make("bb"))  # another partition is another request
    second = store.put(make())
    assert {e.id for e in store.entries()} == {second, other}
    assert len(payloads(store.folder)) == 2
    with pytest.raises(RecordError, match="no longer"):
        store.read(first, ["half"])


def test_reopening_finds_everything(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        record_id = store.put(make())
        store.note_hit(record_id, 4.0)
    with Store(tmp_path) as store:
        assert [e.id for e in store.entries("aa")] == [record_id]
        assert store.stats().hits == 1
        assert torch.equal(store.read(record_id, ["scalar"])["scalar"], torch.tensor(3.5))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tensors": {"t": torch.tensor([1.0, float("nan")])}}, "NaN or infinity"),
        ({"tensors": {"t": torch.tensor([float("inf")]).half()}}, "NaN or infinity"),
        ({"tensors": {"t": torch.zeros(2, dtype=torch.complex64)}}, "complex64"),
        ({"tensors": {"t": torch.zeros(2, device="meta")}}, "CPU tensor"),
        ({"tensors": {"t": [1.0]}}, "list"),
        ({"tensors": {"__metadata__": torch.zeros(2)}}, "cannot name a tensor"),
        ({"signature": np.array([np.nan], np.float16)}, "signature holds NaN"),
        ({"signature": np.zeros((2, 2), np.float16)}, "shape"),
        ({"meta": {"seconds": float("nan")}}, "JSON"),
        ({"meta": {"tensor": torch.zeros(1)}}, "JSON"),
        ({"meta": [1]}, "dict"),
        ({"meta": {"long": "x" * (1 << 20)}}, "characters"),
        ({"partition": "../../etc"}, "partition"),
        ({"identity": ""}, "identity"),
    ],
)
def test_put_refuses(store: Store, change: dict, text: str) -> None:
    fields = {**make().__dict__, **change}
    with pytest.raises(StoreError, match=text):
        store.put(Draft(**fields))
    assert store.entries() == []
    assert payloads(store.folder) == []


def test_record_larger_than_the_store_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path, 10_000) as store, pytest.raises(StoreError, match="raise the limit"):
        store.put(make(size=10_000))


def test_hits_delete_clear_stats(store: Store) -> None:
    first, second = store.put(make(identity="01")), store.put(make(identity="02"))
    store.note_hit(first, 1.5)
    store.note_hit(first, float("nan"))
    store.note_hit("not a record", 2.0)
    store.flush()
    stats = store.stats()
    assert (stats.records, stats.hits, stats.seconds_saved) == (2, 3, 3.5)
    assert stats.bytes > sum(path.stat().st_size for path in payloads(store.folder))
    assert store.delete(first)
    assert not store.delete(first)
    assert [e.id for e in store.entries()] == [second]
    assert len(payloads(store.folder)) == 1
    store.clear()
    assert store.entries() == []
    assert payloads(store.folder) == []
    assert (store.stats().records, store.stats().bytes) == (0, 0)
    store.put(make())
    assert len(store.entries()) == 1


def test_folder_is_private(store: Store) -> None:
    if os.name != "posix":
        pytest.skip("file modes are POSIX")
    assert store._index.root.stat().st_mode & 0o777 == 0o700


def test_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot be written") as caught:
        Store(tmp_path / "file" / "store")
    assert str(tmp_path / "file") in str(caught.value)
    assert "choose another folder" in str(caught.value)
    with pytest.raises(StoreError, match="name a folder"):
        Store("  ")
    os.environ["CARNATOR_TEST_VARIABLE"] = "x"
    try:
        with pytest.raises(StoreError, match="variable"):
            Store(tmp_path / "$CARNATOR_TEST_VARIABLE")
    finally:
        del os.environ["CARNATOR_TEST_VARIABLE"]
    for limit in (0, -1, True, 1.5):
        with pytest.raises(StoreError, match="size limit"):
            Store(tmp_path / "s", limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("stage", ["payload", "row"])
def test_a_failed_write_leaves_nothing(store: Store, monkeypatch, error, stage: str) -> None:
    kept = store.put(make(identity="02"))
    original = PlainDisk.store

    def failing(self, value, read, key=None):
        if read and stage == "payload":
            chunks = iter([value.read(100), error])

            class Stream:
                def read(self, size):
                    chunk = next(chunks)
                    if isinstance(chunk, BaseException):
                        raise chunk
                    return chunk

            value = Stream()
        elif not read:
            assert payloads(store.folder) != []
            assert [e.id for e in store.entries()] == [kept]  # payload written, not yet visible
            raise error
        return original(self, value, read, key)

    monkeypatch.setattr(PlainDisk, "store", failing)
    with pytest.raises((StoreError, KeyboardInterrupt)):
        store.put(make(identity="01"))
    monkeypatch.undo()
    assert [e.id for e in store.entries()] == [kept]
    assert len(payloads(store.folder)) == 1
    store.put(make(identity="01"))
    assert len(store.entries()) == 2
