"""Results of several backbones joined into one file."""

from __future__ import annotations

import json

import pytest

from benchmarks import merge
from benchmarks.fidelity import save
from benchmarks.measured import Measured, Point


def pair() -> Measured:
    point = Point(8.0, 8.0, 33.0, 32.0, 0.9, 1.0, None)
    plain = ("color", "a", "b", 3, "cfg 4", "hit", "near", 0.1, 0.2, 8, 30)
    return Measured(*plain, own=point, dense=point, curves={"plain": [point, point]})


def test_backbones_are_joined_and_later_parts_win(tmp_path, monkeypatch):
    for name, backbone, figure in (("a", "wan", 1), ("b", "ltx", 2), ("c", "wan", 3)):
        data = {"command": name, "summary": {backbone: {"n": figure}}}
        save(tmp_path / f"{name}.json", {**data, "pairs": {backbone: [pair()]}})
    parts = [str(tmp_path / f"{name}.json") for name in "abc"]
    monkeypatch.setattr("sys.argv", ["merge", str(tmp_path / "out.json"), *parts])
    merge.main()
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["summary"] == {"wan": {"n": 3}, "ltx": {"n": 2}}
    assert data["command"] == "a ; b ; c"
    assert data["pairs"]["ltx"] == [json.loads(json.dumps(pair().as_dict()))]


def test_results_of_different_benchmarks_are_refused():
    with pytest.raises(ValueError, match="not results of one benchmark"):
        merge.merged([{"command": "", "summary": {}}, {"command": "", "rows": []}])
