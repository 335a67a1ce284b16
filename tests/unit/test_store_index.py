"""A damaged, foreign or vanished index: dropped, rebuilt from the files, never raised."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from records import SUBFOLDER, exercise, identities, payloads, plain, sql

from carnator.store import RecordError, Store, StoreError
from carnator.store.disk import PlainDisk
from carnator.store.record import pack_entry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with two records, closed."""
    with Store(tmp_path / "store") as store:
        store.put(plain("01"))
        store.put(plain("02"))
        store.note_hit(store.entries()[0].id, 1.0)
    return tmp_path / "store"


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER evil AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END",
        "CREATE VIEW evil AS SELECT 1",
        "CREATE TABLE evil (x)",
        "ALTER TABLE Cache ADD COLUMN evil AS (length(value)) VIRTUAL",
        "ALTER TABLE Cache RENAME COLUMN value TO evil",
        "ALTER TABLE Settings ADD COLUMN evil",
    ],
)
def test_foreign_schema_is_replaced_and_the_index_rebuilt(folder: Path, statement: str) -> None:
    sql(folder, statement)
    with Store(folder) as store:
        assert identities(store.entries("aa")) == {"01", "02"}
    assert sql(folder, "SELECT 1 FROM sqlite_master WHERE name = 'evil'") == []
    exercise(folder)


@pytest.mark.parametrize("content", [b"", b"not a database" * 500, None])
def test_damaged_or_missing_database_is_rebuilt_from_the_files(folder: Path, content) -> None:
    database = folder / SUBFOLDER / "cache.db"
    if content is None:
        database.unlink()
    else:
        database.write_bytes(content)
    with Store(folder) as store:
        entries = store.entries("aa")
        assert identities(entries) == {"01", "02"}
        assert entries[0].meta == {"seconds": 1.0}
        assert entries[0].signature.tolist() == [1.0] * 4
        assert sorted(e.nbytes for e in entries) == sorted(
            p.stat().st_size for p in payloads(folder)
        )
        assert all(len(store.read(e.id, ["a", "b"])) == 2 for e in entries)


def test_database_damaged_while_open(folder: Path, tmp_path: Path) -> None:
    with Store(folder) as store:
        store._index.open()._sql("PRAGMA wal_checkpoint(TRUNCATE)")
        database = folder / SUBFOLDER / "cache.db"
        with open(database, "r+b") as file:
            file.write(b"\xff" * database.stat().st_size)
        store._index.close()
        for _ in range(3):
            store.entries()
        assert identities(store.entries()) == {"01", "02"}
        store.put(plain("03"))
        assert identities(store.entries()) == {"01", "02", "03"}


def test_linked_database_is_not_followed(folder: Path, tmp_path: Path) -> None:
    if os.name != "posix":
        pytest.skip("links need rights on Windows")
    database, elsewhere = folder / SUBFOLDER / "cache.db", tmp_path / "elsewhere.db"
    shutil.move(database, elsewhere)
    before = elsewhere.read_bytes()
    database.symlink_to(elsewhere)
    exercise(folder)
    assert elsewhere.read_bytes() == before
    assert not database.is_symlink()


@pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"{}", b"0" * 64 + b"{}", "text", 5, None])
def test_corrupt_index_row_is_dropped_alone(folder: Path, value: object, caplog) -> None:
    with Store(folder) as store:
        damage = "UPDATE Cache SET value = ? WHERE rowid = (SELECT MAX(rowid) FROM Cache WHERE"
        sql(folder, f"{damage} key LIKE 'entry:%')", value)
        with caplog.at_level(logging.WARNING, "carnator"):
            assert identities(store.entries("aa")) == {"01"}
            assert identities(store.entries()) == {"01"}
        assert len(caplog.records) == 1
        assert len(payloads(folder)) == 1


def test_index_row_of_another_record_or_partition_is_dropped(folder: Path) -> None:
    with Store(folder) as store:
        first, second = store.entries()
    set_row = "UPDATE Cache SET value = ? WHERE key = ?"
    sql(folder, set_row, pack_entry(first), f"entry:{second.id}")
    with Store(folder) as store:
        assert [e.id for e in store.entries()] == [first.id]
        sql(folder, "UPDATE Cache SET tag = 'bb' WHERE key LIKE 'entry:%'")
        assert store.entries("bb") == []
        assert store.entries() == []


def test_undecodable_text_rows_do_not_stop_a_listing(folder: Path) -> None:
    with Store(folder) as store:
        insert = (
            "INSERT INTO Cache (key, raw, tag, mode, value) VALUES (CAST(? AS TEXT), 1, ?, 1, ?)"
        )
        sql(folder, insert, b"entry:\xff\xfe", "aa", b"x")
        sql(folder, "UPDATE Cache SET value = CAST(? AS TEXT) WHERE key LIKE 'use:%'", b"\xff")
        assert identities(store.entries("aa")) == {"01", "02"}
        assert identities(store.entries()) == {"01", "02"}
    exercise(folder)


def test_folder_deleted_while_running(folder: Path) -> None:
    if os.name == "nt":
        pytest.skip("Windows does not delete open files")
    with Store(folder) as store:
        known = store.entries()[0].id
        shutil.rmtree(folder)
        with pytest.raises(RecordError):
            store.read(known, ["a"])
        shutil.rmtree(folder, ignore_errors=True)
        assert store.entries() == []
        shutil.rmtree(folder, ignore_errors=True)
        store.note_hit(known, 1.0)
        store.submit(plain("03"))
        assert store.flush(20)
        assert identities(store.entries()) == {"03"}
        shutil.rmtree(folder)
        folder.write_text("in the way")
        assert store.entries() == []
        assert store.stats().records == 0
        assert not store.delete(known)
        store.submit(plain("04"))
        assert store.flush(20)
        with pytest.raises(RecordError):
            store.read(known, ["a"])
        with pytest.raises(StoreError, match="cannot be written"):
            store.put(plain("05"))
        folder.unlink()
        store.put(plain("06"))
        assert identities(store.entries()) == {"06"}


def test_rebuild_after_a_process_that_died(folder: Path) -> None:
    whole, partial = payloads(folder)
    sql(folder, "DELETE FROM Cache WHERE key <> 'ready'")  # as when no row was ever written
    partial.write_bytes(partial.read_bytes()[:-10])
    foreign = folder / "notes.txt"
    foreign.write_text("mine")
    with Store(folder) as store:
        store.rebuild()
        assert len(store.entries()) == 1
        assert store.rebuild() == 0
        assert payloads(folder) == [whole]
        (entry,) = store.entries("aa")
        assert torch.equal(store.read(entry.id, ["a"])["a"], plain("01").tensors["a"])
        sql(folder, "DELETE FROM Cache WHERE key LIKE 'entry:%'")  # died between the two rows
        assert store.rebuild() == 1
        assert len(store.entries("aa")) == 1
    assert foreign.read_text() == "mine"


def test_passing_trouble_keeps_the_record(folder: Path, monkeypatch) -> None:
    with Store(folder) as store:
        record_id = store.entries()[0].id
        with monkeypatch.context() as patch:
            patch.setattr(
                PlainDisk, "fetch", lambda *_: (_ for _ in ()).throw(OSError(24, "files"))
            )
            with pytest.raises(RecordError, match="just now"):
                store.read(record_id, ["a"])
        assert len(store.read(record_id, ["a"])) == 1
