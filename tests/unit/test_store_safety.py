"""Planted pickles, settings and paths: the store's folder is untrusted input."""

from __future__ import annotations

import io
import logging
import os
import pickle
import zipfile
from pathlib import Path

import diskcache
import pytest
import torch
from records import SUBFOLDER, exercise, identities, payloads, plain, sql

from carnator.store import RecordError, Store
from carnator.store.database import SafeCache
from carnator.store.disk import PlainDisk, UnsafeRow


class Bomb:
    """Unpickling it makes the marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path):
    path = tmp_path / "executed"
    with pytest.raises(FileExistsError):  # the bomb does work
        pickle.loads(pickle.dumps(Bomb(tmp_path)))
    yield path
    assert not path.exists(), "a planted pickle was loaded"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with two records, closed."""
    with Store(tmp_path / "store") as store:
        store.put(plain("01"))
        store.put(plain("02"))
        store.note_hit(store.entries()[0].id, 1.0)
    return tmp_path / "store"


PLANT = (
    "UPDATE Cache SET mode = 4, filename = ?, value = ? WHERE rowid ="
    " (SELECT MIN(rowid) FROM Cache WHERE key LIKE ?)"
)


@pytest.mark.parametrize("when", ["before opening", "while open"])
@pytest.mark.parametrize("place", ["in the database", "in a file"])
@pytest.mark.parametrize("row", ["entry:%", "record:%", "use:%", "totals"])
def test_planted_pickle_value(folder: Path, marker: Path, row: str, place: str, when: str) -> None:
    data = pickle.dumps(Bomb(marker))
    (folder / SUBFOLDER / "aa" / "bb").mkdir(parents=True)
    name = f"aa/bb/{'0' * 28}.val"
    (folder / SUBFOLDER / name).write_bytes(data)
    args = (None, data, row) if place == "in the database" else (name, None, row)
    if when == "before opening":
        sql(folder, PLANT, *args)
    else:
        with Store(folder) as store:
            sql(folder, PLANT, *args)
            for entry in store.entries():
                try:
                    store.read(entry.id, ["a"])
                except RecordError:
                    assert row != "totals"
            store.note_hit("0" * 32, 1.0)
            store.flush()
            assert store.stats().records >= 1
    exercise(folder)


def test_planted_pickle_key(folder: Path, marker: Path) -> None:
    insert = "INSERT INTO Cache (key, raw, tag, mode, value) VALUES (?, ?, 'aa', 1, 'x')"
    data = pickle.dumps(Bomb(marker))
    with Store(folder) as store:
        sql(folder, insert, data, 0)
        sql(folder, insert, b"entry:" + data, 0)
        assert identities(store.entries()) == {"01", "02"}
        assert identities(store.entries("aa")) == {"01", "02"}
    assert {"03", "04"} & identities(exercise(folder))
    assert sql(folder, "SELECT COUNT(*) FROM Cache WHERE raw = 0") == [(0,)]


@pytest.mark.parametrize("kind", ["pickle", "torch zip", "plain zip", "empty", "text"])
def test_payload_replaced(folder: Path, marker: Path, kind: str, caplog) -> None:
    buffer = io.BytesIO()
    if kind == "pickle":
        pickle.dump(Bomb(marker), buffer)
    elif kind == "torch zip":
        torch.save({"a": Bomb(marker)}, buffer)
    elif kind == "plain zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("data.pkl", pickle.dumps(Bomb(marker)))
    elif kind == "text":
        buffer.write(b"{" * 5000)
    for path in payloads(folder):
        path.write_bytes(buffer.getvalue())
    with Store(folder) as store, caplog.at_level(logging.WARNING, "carnator"):
        for entry in store.entries():
            with pytest.raises(RecordError, match="dropped"):
                store.read(entry.id, ["a"])
        assert store.entries() == []
        assert len([r for r in caplog.records if "dropped record" in r.message]) == 2
    assert payloads(folder) == []
    exercise(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("disk_pickle_protocol", 4),
        ("disk__directory", "/tmp"),
        ("disk_directory", "/tmp"),
        ("_directory", "/"),
        ("_disk", "x"),
        ("get", "x"),
        ("eviction_policy", "least-recently-stored"),
        ("cull_limit", 1000),
        ("size_limit", 1),
        ("count", "many"),
        ("size", b"\xff"),
        ("sqlite_journal_mode", "off; DROP TABLE Cache"),
        ("sqlite_writable_schema", 1),
        (b"\xff\xfe", 1),
    ],
)
def test_malicious_settings(folder: Path, marker: Path, key: object, value: object) -> None:
    sql(folder, "INSERT OR REPLACE INTO Settings VALUES (?, ?)", key, value)
    with Store(folder) as store:
        assert identities(store.entries()) == {"01", "02"}
        cache = store._index.open()
        assert type(cache.disk) is PlainDisk
        assert Path(cache.directory) == Path(cache.disk._directory) == store._index.root
        assert (cache.eviction_policy, cache.cull_limit) == ("none", 0)
        assert all(len(store.read(e.id, ["a"])) == 1 for e in store.entries())
    exercise(folder)


def test_file_names_cannot_lead_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim.val"
    victim.write_bytes(b"precious")
    names = ["../../victim.val", str(victim), "../" * 9 + str(victim)]
    if os.name == "posix":
        shards = (f"{i:02x}" for i in range(256))  # the store has made some by chance
        shard = next(name for name in shards if not (folder / SUBFOLDER / name).exists())
        (folder / SUBFOLDER / shard).symlink_to(tmp_path / "linked")
        (tmp_path / "linked" / "dd").mkdir(parents=True)
        linked = tmp_path / "linked" / "dd" / f"{'0' * 28}.val"
        linked.write_bytes(b"precious")
        names.append(f"{shard}/dd/{'0' * 28}.val")
    for name in names:
        with Store(folder) as store:
            store.put(plain("05"))
            sql(folder, "UPDATE Cache SET filename = ? WHERE key LIKE 'record:%'", name)
            for entry in store.entries():
                with pytest.raises(RecordError):
                    store.read(entry.id, ["a"])
            store.clear()
    assert victim.read_bytes() == b"precious"
    assert os.name != "posix" or linked.read_bytes() == b"precious"


def test_disk_has_no_plain_form_for_anything_else(tmp_path: Path, marker: Path) -> None:
    disk = PlainDisk(str(tmp_path), min_file_size=100)
    for key in (b"x", 1, 1.0, None, ("a",), Bomb(marker)):
        with pytest.raises(TypeError):
            disk.put(key)
        with pytest.raises(TypeError):
            disk.hash(key)
    bad = (None, True, [1], {}, 1 << 63, float("nan"), "x" * 100, b"x" * 100, Bomb(marker))
    for value in bad:
        with pytest.raises(TypeError):
            disk.store(value, False)
        with pytest.raises(TypeError):
            disk.store(value, True)
    data = pickle.dumps(Bomb(marker))
    for raw in (0, False, None, 2):
        with pytest.raises(UnsafeRow):
            disk.get(data, raw)
    for mode in (0, 3, 4, None, "4", 5):
        for filename in (None, "aa/bb/" + "0" * 28 + ".val"):
            with pytest.raises(UnsafeRow):
                disk.fetch(mode, filename, data, False)
    for value in (b"x", "x", 1, 1.5):
        _, mode, name, stored = disk.store(value, False)
        assert disk.fetch(mode, name, stored, False) == value
    name = disk.filename()[0]
    assert disk.write(name, io.BytesIO(b"y" * 100)) == 100
    with pytest.raises(FileExistsError):
        disk.write(name, io.BytesIO(b"z"))
    with disk.fetch(diskcache.core.MODE_BINARY, name, None, True) as stream:
        assert stream.read() == b"y" * 100
    assert disk.remove(name)
    assert list(tmp_path.iterdir()) == []


def test_no_way_through_diskcache_pickles(tmp_path: Path, marker: Path, monkeypatch) -> None:
    def refuse(*_args, **_kwargs):
        raise AssertionError("pickle was used")

    for name in ("dumps", "dump", "loads", "load"):
        monkeypatch.setattr(diskcache.core.pickle, name, refuse)
    cache = SafeCache(tmp_path)
    for call in (
        lambda: cache.set("k", [1]),
        lambda: cache.add(("k",), b"v"),
        lambda: cache.incr(1),
        lambda: cache.memoize()(lambda: 1)(),
    ):
        with pytest.raises(TypeError):
            call()
    cache.set("k", b"v")
    assert cache["k"] == b"v"
    assert list(cache) == list(cache.iterkeys()) == ["k"]
    cache.close()
