"""Damaged and hostile payloads are dropped, each with one line in the log."""

from __future__ import annotations

import json
import logging
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from records import payloads, plain
from safetensors.torch import save

from carnator.store import RecordError, Store
from carnator.store.header import read_header
from carnator.store.record import seal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with two records, closed."""
    with Store(tmp_path / "store") as store:
        store.put(plain("01"))
        store.put(plain("02"))
        store.note_hit(store.entries()[0].id, 1.0)
    return tmp_path / "store"


def header_of(data: bytes) -> dict:
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def with_header(data: bytes, header: dict | bytes) -> bytes:
    body = data[8 + struct.unpack("<Q", data[:8])[0] :]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def described(data: bytes, **change: object) -> bytes:
    header = header_of(data)
    description = json.loads(header["__metadata__"]["carnator"][64:])
    for key, value in change.items():
        description[key] = value
    header["__metadata__"]["carnator"] = seal(json.dumps(description))
    return with_header(data, header)


def tensor(data: bytes, **change: object) -> bytes:
    header = header_of(data)
    header["a"].update(change)
    return with_header(data, header)


def nan_with_right_sum(data: bytes) -> bytes:
    values = np.full((3, 100), np.nan, "<f4").tobytes()
    label = b'["a","F32",[3,100]]'
    sums = {"a": zlib.crc32(values, zlib.crc32(label)), "b": 0}
    data = described(data, sums=sums)
    return data[: -len(values) - 8] + values + data[-8:]


CORRUPTIONS = {
    "truncated": lambda d: d[:-1],
    "longer": lambda d: d + b"\0",
    "half": lambda d: d[: len(d) // 2],
    "seven bytes": lambda d: d[:7],
    "header of 2^63": lambda d: struct.pack("<Q", 1 << 63) + d[8:],
    "header of file size": lambda d: struct.pack("<Q", len(d)) + d[8:],
    "header of 0": lambda d: struct.pack("<Q", 0) + d[8:],
    "bit in tensor a": lambda d: d[:-100] + bytes([d[-100] ^ 1]) + d[-99:],
    "bit in description": lambda d: d.replace(b"seconds", b"sEconds"),
    "deep JSON": lambda d: with_header(d, b"[" * 100_000 + b"]" * 100_000),
    "a list": lambda d: with_header(d, b"[1, 2]"),
    "not UTF-8": lambda d: with_header(d, b"{\xff\xfe}"),
    "no metadata": lambda d: with_header(d, {k: v for k, v in header_of(d).items() if k in "ab"}),
    "foreign safetensors": lambda _: save({"a": torch.ones(3)}),
    "version 1": lambda d: described(d, format=1),
    "version true": lambda d: described(d, format=True),
    "other id": lambda d: described(d, id="0" * 32),
    "id a path": lambda d: described(d, id="../../x"),
    "partition a list": lambda d: described(d, partition=["aa"]),
    "meta a list": lambda d: described(d, meta=[]),
    "NaN in meta": lambda d: described(d, meta={"seconds": float("nan")}),
    "signature not base64": lambda d: described(d, signature="*"),
    "signature odd": lambda d: described(d, signature="AAAA"),
    "signature infinite": lambda d: described(d, signature="AHw="),
    "created text": lambda d: described(d, created="now"),
    "no sums": lambda d: described(d, sums=None),
    "a sum is missing": lambda d: described(d, sums={"a": 1}),
    "a sum is text": lambda d: described(d, sums={"a": "1", "b": 1}),
    "NaN with right sum": nan_with_right_sum,
    "absurd shape": lambda d: tensor(d, shape=[1 << 62, 1 << 62]),
    "empty absurd shape": lambda d: tensor(d, shape=[0, 1 << 60], data_offsets=[0, 0]),
    "negative shape": lambda d: tensor(d, shape=[-3, -100]),
    "float shape": lambda d: tensor(d, shape=[3.0, 100]),
    "other shape": lambda d: tensor(d, shape=[100, 3]),
    "shape a text": lambda d: tensor(d, shape="300"),
    "rank 99": lambda d: tensor(d, shape=[1] * 97 + [3, 100]),
    "unknown dtype": lambda d: tensor(d, dtype="F8_E4M3"),
    "dtype a list": lambda d: tensor(d, dtype=["F32"]),
    "other dtype": lambda d: tensor(d, dtype="I32"),
    "offsets back": lambda d: tensor(d, data_offsets=[1200, 0]),
    "offsets negative": lambda d: tensor(d, data_offsets=[-4, 1196]),
    "offsets overlap": lambda d: tensor(d, data_offsets=[4, 1204]),
    "offsets beyond": lambda d: tensor(d, data_offsets=[1 << 40, (1 << 40) + 1200]),
    "offsets three": lambda d: tensor(d, data_offsets=[0, 600, 1200]),
    "tensor a number": lambda d: with_header(d, {**header_of(d), "a": 7}),
    "extra tensor": lambda d: with_header(d, {**header_of(d), "c": header_of(d)["a"]}),
}


@pytest.fixture(scope="module")
def victim_store(tmp_path_factory):
    with Store(tmp_path_factory.mktemp("damage")) as store:
        yield store


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupt_payload_is_dropped(victim_store: Store, name: str, caplog) -> None:
    store = victim_store
    store.clear()
    record_id = store.put(plain("01"))
    (path,) = payloads(store.folder)
    good = path.read_bytes()
    bad = CORRUPTIONS[name](good)
    assert bad != good
    path.write_bytes(bad)
    refusal = pytest.raises(RecordError, match=f"Record {record_id} was dropped: .+")
    with caplog.at_level(logging.WARNING, "carnator"), refusal:
        store.read(record_id, ["a"])
    assert len(caplog.records) == 1
    assert store.entries() == []
    assert payloads(store.folder) == []


def test_untouched_tensors_of_a_damaged_record_are_still_read(folder: Path) -> None:
    with Store(folder) as store:
        path = payloads(folder)[0]
        with open(path, "rb") as stream:
            record_id = read_header(stream).entry.id
        data = path.read_bytes()
        path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
        assert store.read(record_id, ["b"])["b"].sum() == 8
        with pytest.raises(RecordError, match="checksum"):
            store.read(record_id, ["a", "b"])


def test_unknown_names_and_ids(folder: Path) -> None:
    with Store(folder) as store:
        first = store.entries()[0].id
        with pytest.raises(RecordError, match="no tensor 'z'"):
            store.read(first, ["z"])
        for bad in ("", "x", "../x", "entry:%", "0" * 32, "\ud800"):
            with pytest.raises(RecordError):
                store.read(bad, ["a"])
            assert not store.delete(bad)
        assert len(store.entries()) == 1
