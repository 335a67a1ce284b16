"""Files that anybody could have made: thousands of damaged ones, and properties of sound ones."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import payloads, plain

from carnator.store import Draft, RecordError, Store, StoreError
from carnator.store.header import DTYPES, is_finite, read_header, read_tensors
from carnator.store.payload import encode
from carnator.store.record import FORMAT, NAME, is_record_id, pack_entry, seal, unpack_entry
from carnator.store.transfer import MAGIC

FILES = 500
WORDS = ["d.0", "__metadata__", "carnator", "../../x", "\x00", "shape", "F32", "", "a" * 300]
ODD = [0, -1, 1, 2, 1 << 31, 1 << 62, 1 << 70, 1.5, None, True, [], {}, "8", [1 << 40] * 9]


def written(draft: Draft) -> bytes:
    payload, parts = encode(draft, "ab" * 16, 1e9), []
    while part := payload.read(1 << 20):
        parts.append(bytes(part))
    return b"".join(parts)


def split(data: bytes) -> tuple[dict, bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One of many ways to spoil a payload: bytes, cuts, and well-formed headers that lie."""
    way = rng.randrange(8)
    if way == 0:
        spoilt = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            spoilt[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(spoilt)
    if way == 1:
        return data[: rng.randrange(len(data))]
    if way == 2:
        at = rng.randrange(len(data))
        return data[:at] + rng.randbytes(rng.randint(1, 64)) + data[at:]
    if way == 3:
        return struct.pack("<Q", rng.choice([0, 1, len(data), 1 << 40, 2**64 - 1])) + data[8:]
    header, body = split(data)
    name = rng.choice([n for n in header if n != "__metadata__"])
    if way == 4:
        header[name][rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(ODD)
    elif way == 5:
        values = header[name][rng.choice(["shape", "data_offsets"])]
        values[rng.randrange(len(values))] = rng.choice(ODD)
    elif way == 6:
        header[rng.choice(WORDS)] = header.pop(name)
    else:
        described = json.loads(header["__metadata__"]["carnator"][64:])
        key = rng.choice(list(described))
        described[key] = rng.choice([*ODD, *WORDS])
        header["__metadata__"]["carnator"] = seal(json.dumps(described))
    return joined(header, body)


def taken_in(stream) -> dict | None:
    """What a store does with a file: all of its tensors, or nothing."""
    try:
        header = read_header(stream)
        header.check_spans()
        return read_tensors(stream, header, header.names)
    except RecordError as error:
        assert str(error)
        return None


def test_thousands_of_spoilt_files_are_refused_or_whole(tmp_path: Path) -> None:
    """Every one is refused with a reason, or what is read is what was written: never another
    error, never other numbers, never an absurd amount of memory."""
    rng = random.Random(11)
    draft = plain("01")
    sound, path = written(draft), tmp_path / "payload"
    refused = 0
    for _ in range(FILES):
        path.write_bytes(mutated(sound, rng))
        with open(path, "rb") as stream:
            tensors = taken_in(stream)
        refused += tensors is None
        for name, tensor in (tensors or {}).items():
            assert torch.equal(tensor, draft.tensors[name])
    assert refused > 0.85 * FILES, "the spoiling does not spoil"


def test_spoilt_files_in_a_store_cost_one_line_each_and_nothing_else(
    tmp_path: Path, caplog
) -> None:
    rng = random.Random(12)
    with Store(tmp_path) as store:
        for turn in range(60):
            store.clear()
            sane = store.put(plain("01"))
            (good,) = payloads(tmp_path)
            store.put(plain("02"))
            (bad,) = [path for path in payloads(tmp_path) if path != good]
            data = bad.read_bytes()
            while (spoilt := mutated(data, rng)) == data:
                pass
            bad.write_bytes(spoilt)
            caplog.clear()
            with caplog.at_level(logging.WARNING, "carnator"):
                faults = [fault for _, fault in store.verify() if fault]
                if turn % 2:
                    store.rebuild()
            assert len(caplog.records) == len(faults) <= 1
            assert sane in {entry.id for entry in store.entries()}
            assert len(store.entries()) == len(payloads(tmp_path)) == 2 - len(faults)


@pytest.mark.parametrize("planted", ["pipe", "folder", "link", "device"])
def test_what_is_no_plain_file_is_not_opened(tmp_path: Path, planted: str) -> None:
    if os.name != "posix":
        pytest.skip("POSIX files")
    with Store(tmp_path / "s") as store:
        record_id = store.put(plain("01"))
        (path,) = payloads(tmp_path)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(path.read_bytes())
        path.unlink()
        if planted == "pipe":
            os.mkfifo(path)
        elif planted == "folder":
            path.mkdir()
        else:
            path.symlink_to(elsewhere if planted == "link" else "/dev/zero")
        with pytest.raises(RecordError):
            store.read(record_id, ["a"])
        store.rebuild()
        assert planted == "folder" or store.entries() == []
    assert elsewhere.stat().st_size > 1000


@settings(max_examples=60)
@given(st.data())
def test_any_sound_record_comes_back_as_it_was(data) -> None:
    shapes = st.lists(st.integers(0, 5), max_size=4)
    named = data.draw(
        st.dictionaries(
            st.text(min_size=1, max_size=30).filter(lambda n: n != "__metadata__" and _utf8(n)),
            st.tuples(st.sampled_from(list(DTYPES.values())), shapes),
            max_size=6,
        )
    )
    tensors = {n: torch.randint(-100, 100, shape).to(dtype) for n, (dtype, shape) in named.items()}
    meta = data.draw(st.dictionaries(st.text(max_size=9).filter(_utf8), JSON, max_size=4))
    numbers = data.draw(st.lists(st.floats(-6e4, 6e4, width=16), max_size=20))
    made = written(Draft("p.1", "i-2", meta, tensors, np.array(numbers, np.float16)))
    stream = io.BytesIO(made)
    header = read_header(stream, 0, len(made))
    header.check_spans()
    entry = header.entry
    assert (entry.partition, entry.identity, entry.meta) == ("p.1", "i-2", meta)
    assert np.array_equal(entry.signature, np.array(numbers, np.float16))
    back = read_tensors(stream, header, header.names)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[n], t) and back[n].dtype == t.dtype for n, t in tensors.items())
    again = unpack_entry(pack_entry(entry), entry.id)
    assert (again.meta, again.nbytes) == (meta, len(made))


def _utf8(text: str) -> bool:
    try:
        return bool(text.encode("utf-8")) or True
    except UnicodeEncodeError:
        return False


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9).filter(_utf8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5).filter(_utf8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.text(max_size=140))
def test_keys_are_of_known_form_or_refused(text: str) -> None:
    draft = plain("01")
    good = NAME.fullmatch(text) is not None
    for field in ("partition", "identity"):
        try:
            encode(Draft(**{**draft.__dict__, field: text}), "ab" * 16, 1e9)
            assert good
        except StoreError as error:
            assert not good and field in str(error)
    assert ":" not in text or not good, "a key of the index is made of parts between colons"
    assert not good or not {"/", "\\", "\0", " "} & set(text)
    assert is_record_id(text) == (len(text) == 32 and set(text) <= set("0123456789abcdef"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_means_every_number(dtype: torch.dtype) -> None:
    numbers = torch.full((1000,), torch.finfo(dtype).max / 2, dtype=dtype)
    assert is_finite(numbers), "a sum that overflows is no fault"
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoilt = numbers.clone()
        spoilt[567] = bad
        assert not is_finite(spoilt)
    assert not is_finite(torch.tensor([torch.inf, -torch.inf]).to(dtype))
    assert is_finite(torch.zeros(0, dtype=dtype)) and is_finite(torch.arange(3))


# Exported files.


def test_spoilt_exports_are_refused_or_taken_in_part(tmp_path: Path) -> None:
    with Store(tmp_path / "from") as store:
        for i in range(3):
            store.put(plain(f"{i:02x}"))
        store.export(tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    rng, path = random.Random(13), tmp_path / "spoilt"
    outcomes = set()
    with Store(tmp_path / "to") as store:
        for _ in range(150):
            spoilt = bytearray(good)
            if rng.random() < 0.3:
                del spoilt[rng.randrange(len(good)) :]
            for _ in range(rng.randint(1, 3)):
                spoilt[rng.randrange(max(1, len(spoilt))) : 0] = rng.randbytes(rng.randrange(3))
                if spoilt:
                    spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
            path.write_bytes(spoilt)
            store.clear()
            try:
                done = store.import_file(path)
                outcomes.add(done.taken)
                assert done.taken == len(store.entries()) and done.known == 0
            except StoreError as error:
                outcomes.add(-1)
                assert "format" in str(error)
            for _, fault in store.verify():
                assert not fault
    assert {0, 1, 2} & outcomes and outcomes <= {-1, 0, 1, 2, 3}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        pickle.dumps({"a": 1}),
        MAGIC[:-1],
        MAGIC.replace(str(FORMAT).encode(), b"9"),
        f"carnator records, format {FORMAT - 1}\n".encode(),
    ],
)
def test_what_is_no_export_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with Store(tmp_path / "s") as store:
        with pytest.raises(StoreError, match="no file of 'carnator records, format"):
            store.import_file(tmp_path / "file")
        with pytest.raises(StoreError, match="cannot be read"):
            store.import_file(tmp_path / "nowhere")
        with pytest.raises(StoreError, match="cannot be read"):
            store.import_file(tmp_path)
        assert store.entries() == []


def test_an_export_that_claims_absurd_lengths(tmp_path: Path) -> None:
    for length in (1, 9, 1 << 40, 2**64 - 1):
        (tmp_path / "file").write_bytes(MAGIC + struct.pack("<Q", length) + b"x" * 20)
        with Store(tmp_path / "s") as store:
            assert store.import_file(tmp_path / "file").taken == 0
