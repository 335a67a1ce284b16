"""``python -m carnator store``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from records import make, payloads, plain

from carnator.cli import main
from carnator.store import Store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Store(tmp_path / "store", 1 << 30) as store:
        for i, label in enumerate(("red circle", "blue square", "green star")):
            store.put(make(identity=f"{i:02x}", label=label))
        store.note_hit(store.entries()[0].id, 2.5)
    return tmp_path / "store"


def ids(folder: Path) -> list[str]:
    with Store(folder) as store:
        return [entry.id for entry in store.entries()]


def run(capsys, folder: Path, action: str, *more: str) -> tuple[int, str]:
    status = main(["store", action, *more, "--store", str(folder)])
    streams = capsys.readouterr()
    return status, streams.out + streams.err


def asked(capsys, folder: Path, action: str, *more: str):
    status, out = run(capsys, folder, action, *more, "--json")
    return status, json.loads(out)


def test_stat_and_list(folder: Path, capsys) -> None:
    status, out = run(capsys, folder, "stat")
    assert status == 0
    assert "3 records (0 pinned)" in out and "1 hits, 2.5 seconds saved" in out
    assert "of 1024 MiB" in out, "the limit it was last used with"
    _, data = asked(capsys, folder, "stat")
    assert (data["records"], data["hits"], data["size_limit"]) == (3, 1, 1 << 30)
    assert data["disk_free"] > 0 and data["other_formats"] == []
    _, out = run(capsys, folder, "list")
    assert [line.split("  ")[-1].strip() for line in out.splitlines()] == [
        "green star",
        "blue square",
        "red circle",
    ]
    _, data = asked(capsys, folder, "list", "--search", "blue", "--count", "1")
    assert [card["label"] for card in data] == ["blue square"]
    assert "No records." in run(capsys, folder, "list", "--search", "nothing")[1]


def test_pin_unpin_delete_by_the_beginning_of_an_id(folder: Path, capsys) -> None:
    first, second, third = ids(folder)
    assert run(capsys, folder, "pin", first[:8], second) == (0, "2 records are pinned.\n")
    assert asked(capsys, folder, "stat")[1]["pinned"] == 2
    assert run(capsys, folder, "unpin", second[:12])[0] == 0
    assert [c["pinned"] for c in asked(capsys, folder, "list")[1]] == [True, False, False]
    assert asked(capsys, folder, "delete", third[:6]) == (0, {"deleted": 1})
    assert ids(folder) == [first, second]
    for bad in (third, "zz", first[:3], "", "*", "../x", "0" * 32):
        status, out = run(capsys, folder, "delete", bad)
        assert status == 2 and "store list" in out, bad
    assert len(ids(folder)) == 2


def test_clear_asks_first(folder: Path, capsys) -> None:
    status, out = run(capsys, folder, "clear")
    assert status == 2 and "all 3 records" in out and "--yes" in out
    assert len(ids(folder)) == 3
    assert run(capsys, folder, "clear", "--yes") == (0, "3 records deleted.\n")
    assert payloads(folder) == []


def test_verify_and_rebuild(folder: Path, capsys) -> None:
    assert run(capsys, folder, "verify") == (0, "3 records read, 0 of them dropped.\n")
    path = payloads(folder)[0]
    path.write_bytes(path.read_bytes()[:-3])
    status, data = asked(capsys, folder, "verify")
    assert status == 1 and data["read"] == 3
    (reason,) = data["dropped"].values()
    assert "end at byte" in reason
    assert run(capsys, folder, "rebuild") == (0, "0 records found again.\n")


def test_export_import_prune(folder: Path, tmp_path: Path, capsys) -> None:
    file, other = tmp_path / "records", tmp_path / "other"
    assert asked(capsys, folder, "export", str(file), ids(folder)[0])[1] == {"exported": 1}
    status, out = run(capsys, folder, "export", str(file))
    assert status == 2 and "already there" in out
    assert run(capsys, folder, "export", str(tmp_path / "all"))[0] == 0
    assert asked(capsys, other, "import", str(file))[1] == {"taken": 1, "known": 0, "refused": 0}
    assert asked(capsys, other, "import", str(tmp_path / "all"))[1]["taken"] == 2
    assert set(ids(other)) == set(ids(folder))
    status, out = run(capsys, other, "import", str(tmp_path / "nowhere"))
    assert status == 2 and "cannot be read" in out
    with Store(other) as store:
        for i in range(60):
            store.put(make(identity=f"a{i:02x}", size=10_000))
    _, data = asked(capsys, other, "prune", "--size", "1")
    assert data["evicted"] > 20 and asked(capsys, other, "stat")[1]["bytes"] <= 1 << 20
    (other / "carnator-v1").mkdir()
    (other / "carnator-v1" / "cache.db").write_text("x")
    (other / "carnator-vx").mkdir()
    assert "carnator-v1" in run(capsys, other, "stat")[1]
    assert asked(capsys, other, "prune", "--other-formats")[1]["deleted"] == ["carnator-v1"]
    assert (other / "carnator-vx").is_dir() and not (other / "carnator-v1").exists()


def test_name_spaces_and_wrong_places(folder: Path, tmp_path: Path, capsys) -> None:
    with Store(folder, namespace="ann") as store:
        store.put(plain("01"))
    assert asked(capsys, folder, "stat", "--namespace", "ann")[1]["records"] == 1
    for place, more, text in (
        (tmp_path / "nowhere", (), "There is no store at"),
        (tmp_path, (), "There is no store at"),
        (folder, ("--namespace", "bob"), "There is no store at"),
        (folder, ("--namespace", "../x"), "name space"),
    ):
        status, out = run(capsys, place, "stat", *more)
        assert status == 2 and text in out
    assert not (tmp_path / "nowhere").exists(), "looking makes nothing"


@pytest.mark.parametrize("arguments", [["stat"], ["eat", "--store", "x"], ["pin", "--store", "x"]])
def test_mistyped_commands_say_what_is_wrong(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["store", *arguments])
    assert caught.value.code == 2 and "error:" in capsys.readouterr().err
