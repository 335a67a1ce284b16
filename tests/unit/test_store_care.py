"""What a person does with a store: cards, previews, pins, name spaces, files to take along."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from records import make, payloads, plain

from carnator.store import PREVIEW, Card, Draft, RecordError, Store, StoreError, make_preview
from carnator.store.folder import resolve
from carnator.store.schema import discard_database


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "store") as opened:
        yield opened


def labelled(identity: str, label: str, **meta: object) -> Draft:
    return make(identity=identity, label=label, **meta)


def test_cards_say_what_a_person_wants_to_know(store: Store) -> None:
    first = store.put(labelled("01", "a red\n circle\tleft", sampler="euler", seed=2**63, cfg=4.0))
    second = store.put(labelled("02", "a blue square", architecture="wan", shape=[1, 16, 4, 8, 8]))
    store.note_hit(first, 1.5)
    store.note_hit(first, 2.0)
    store.flush()
    store.pin(second)
    newer, older = store.cards()
    assert (newer.id, newer.pinned, newer.hits, newer.last_used) == (second, True, 0, 0.0)
    assert (newer.model, newer.shape) == ("wan", (1, 16, 4, 8, 8))
    assert (older.label, older.hits, older.seconds_saved) == ("a red circle left", 2, 3.5)
    assert (older.sampler, older.seed, older.cfg) == ("euler", str(2**63), 4.0)
    assert (older.steps, older.seconds) == (2, 2.5)
    assert older.nbytes == store.entry(first).nbytes
    assert abs(older.created - time.time()) < 100 and older.last_used >= older.created
    assert json.loads(json.dumps(older.as_dict()))["label"] == "a red circle left"


def test_cards_are_searched_and_paged(store: Store) -> None:
    for i in range(5):
        store.put(labelled(f"{i:02x}", f"{'Red' if i % 2 else 'blue'} thing {i}"))
    labels = [card.label[-1] for card in store.cards()]
    assert labels == list("43210")
    assert [c.label[-1] for c in store.cards(start=1, count=2)] == list("32")
    assert [c.label for c in store.cards("RED thing")] == ["Red thing 3", "Red thing 1"]
    assert [c.label for c in store.cards("red", start=1, count=5)] == ["Red thing 1"]
    assert store.cards("red blue") == []


@pytest.mark.parametrize(
    "meta",
    [
        {"label": ["x"], "sigmas": 7, "cfg": "x", "seed": 1.5, "shape": "wide", "seconds": None},
        {"label": "\x1b[31m\u202e" + "y" * 5000, "shape": [1] * 99, "cfg": 1e300, "sampler": {}},
        {"shape": [True], "seed": True, "sigmas": {}, "architecture": 5},
    ],
)
def test_a_record_that_says_nonsense_of_itself_has_a_card_all_the_same(store: Store, meta) -> None:
    store.put(make(**meta))
    (card,) = store.cards()
    assert isinstance(card, Card) and len(card.label) <= 500 and card.label.isprintable()
    assert card.seed == "" and card.shape == ()
    json.dumps(card.as_dict(), allow_nan=False)


def test_every_visible_change_is_counted_by_whomever(tmp_path: Path) -> None:
    with Store(tmp_path) as store, Store(tmp_path) as other:
        seen = [store.changes()]

        def changed() -> bool:
            seen.append(store.changes())
            assert seen[-1] == other.changes()
            return seen[-1] not in seen[:-1]

        assert not changed(), "looking changes nothing"
        record_id = other.put(plain("01"))
        assert changed()
        store.entries(), store.read(record_id, ["a"]), store.cards(), store.stats()
        store.claim("name", "owner")
        assert not changed()
        other.note_hit(record_id, 1.0)
        other.flush()
        assert changed()
        other.pin(record_id)
        assert changed()
        other.unpin(record_id)
        assert changed()
        other.delete(record_id)
        assert changed()
        other.put(plain("02"))
        assert changed()
        discard_database(other._index.root)
        assert store.entries() and changed(), "a new index does not begin where the old one did"
        other.clear()
        assert changed()
        assert max(seen) < 2**53, "JavaScript can hold it"


def test_pins_outlast_the_index(store: Store) -> None:
    kept = store.put(plain("01"))
    store.put(plain("02"))
    store.pin(kept)
    discard_database(store._index.root)
    assert {card.id: card.pinned for card in store.cards()}[kept]
    assert sum(card.pinned for card in store.cards()) == 1
    (store._index.root / "pins.json").write_text('["../..", 7, {"a": 1}]')
    discard_database(store._index.root)
    assert not any(card.pinned for card in store.cards())


def test_previews_come_with_the_record_and_only_sound_ones(store: Store, caplog) -> None:
    frames = make_preview(torch.randn(1, 16, 9, 30, 52))
    good = store.put(Draft("aa", "01", {}, {PREVIEW: frames}, np.ones(2, np.float16)))
    shown = store.preview(good)
    assert shown is not None and shown.dtype == np.uint8 and shown.shape == (8, 30, 52, 3)
    assert np.array_equal(shown, frames.numpy())
    for i, odd in enumerate(
        [
            torch.zeros(8, 30, 52, 4, dtype=torch.uint8),
            torch.zeros(8, 30, 52, 3),
            torch.zeros(30, 52, 3, dtype=torch.uint8),
            torch.zeros(1, 2000, 2, 3, dtype=torch.uint8),
            torch.zeros(900, 2, 2, 3, dtype=torch.uint8),
            torch.zeros(0, 2, 2, 3, dtype=torch.uint8),
        ]
    ):
        record = Draft("aa", f"1{i}", {}, {PREVIEW: odd}, np.ones(2, np.float16))
        assert store.preview(store.put(record)) is None
    with caplog.at_level(logging.WARNING):
        without = store.put(plain("02"))
        assert store.preview(without) is None
        assert store.preview("0" * 32) is None and store.preview("../x") is None
        assert caplog.records == [] and store.entry(without) is not None, "it is no fault"


def test_a_preview_shows_the_layout() -> None:
    latent = torch.zeros(1, 4, 3, 20, 40)
    latent[:, :, :, :, 20:] = torch.tensor([1.0, -2.0, 3.0, 0.5]).view(1, 4, 1, 1, 1)
    frames = make_preview(latent).float()
    assert frames.shape == (3, 20, 40, 3)
    assert (frames[..., :20, :].mean() - frames[..., 20:, :].mean()).abs() > 80
    assert frames[..., :20, :].std((0, 1, 2)).max() < 1
    assert torch.equal(make_preview(latent), make_preview(latent.clone()))
    known = make_preview(latent, factors=[[1, 0, 0], [0, 0, 0], [0, 0.2, 0], [0, 0, 0]]).float()
    assert known[0, 0, 39].tolist() == [255.0, 204.0, 128.0] and known[0, 0, 0, 0] == 128.0


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 5, 1, 900), (1, 128, 30, 7, 3)])
def test_previews_of_odd_shapes_and_flat_content(shape) -> None:
    for latent in (torch.zeros(shape), torch.randn(shape) * 1e4):
        frames = make_preview(latent)
        assert frames.dtype == torch.uint8 and frames.shape[3] == 3
        assert len(frames) <= 8 and max(frames.shape[1:3]) <= 64


def test_verify_reads_everything_and_drops_what_is_damaged(store: Store) -> None:
    good, bad = store.put(plain("01")), store.put(plain("02"))
    name = store._index.open().payload_name(bad)
    path = store._index.root / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = dict(store.verify())
    assert found[good] == "" and "checksum" in found[bad]
    assert [entry.id for entry in store.entries()] == [good]


# Name spaces.


def test_name_spaces_know_nothing_of_each_other(tmp_path: Path) -> None:
    names = ["", "default", "Ann_1", "ann_1", "x" * 128]
    stores = [Store(tmp_path, namespace=name) for name in names]
    for i, opened in enumerate(stores):
        opened.put(plain(f"{i:02x}"))
    for i, opened in enumerate(stores):
        assert [e.identity for e in opened.entries()] == [f"{i:02x}"]
    assert len({os.path.normcase(opened.folder) for opened in stores}) == len(names)
    assert all(tmp_path.resolve() in (o.folder, *o.folder.parents) for o in stores)
    stores[2].clear()
    assert [len(opened.entries()) for opened in stores] == [1, 1, 0, 1, 1]
    for opened in stores:
        opened.close()
    with Store(tmp_path, namespace="default") as again:
        assert len(again.entries()) == 1
    shared = Store.open(tmp_path, namespace="default")
    assert shared is Store.open(tmp_path, namespace="default")
    assert shared is not Store.open(tmp_path)
    shared.close()
    Store.open(tmp_path).close()


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "a\\b", ".", " ", "a b", "é", "x" * 129, "a\n", "a:b", 7, None, b"a"]
)
def test_other_name_spaces_are_refused(tmp_path: Path, name) -> None:
    with pytest.raises(StoreError, match="name space"):
        resolve(tmp_path, name)


# Files to take along.


def test_export_and_import(tmp_path: Path, store: Store) -> None:
    ids = [store.put(make("aa" if i % 2 else "bb", f"{i:02x}", label=f"n{i}")) for i in range(5)]
    store.pin(ids[0])
    file = tmp_path / "records"
    assert store.export(file) == 5
    assert [p.name for p in tmp_path.iterdir() if "part" in p.name] == []
    assert store.export(tmp_path / "two", ids[1:3]) == 2
    with pytest.raises(StoreError, match="already there"):
        store.export(file)
    with pytest.raises(RecordError):
        store.export(tmp_path / "none", ["0" * 32])
    with pytest.raises(StoreError, match="cannot be written"):
        store.export(tmp_path / "no" / "such" / "folder")
    assert {p.name for p in tmp_path.iterdir()} == {"records", "two", "store"}, "nothing half done"
    with Store(tmp_path / "other") as other:
        own = other.put(make("aa", "01", label="my own"))
        done = other.import_file(file)
        assert (done.taken, done.known, done.refused) == (4, 1, 0)
        assert (other.import_file(file).known, len(other.entries())) == (5, 5)
        assert own in {e.id for e in other.entries()}, "one's own stays"
        assert not any(card.pinned for card in other.cards())
        for card in other.cards():
            if card.id != own:
                wanted = store.read(card.id, ["cond.q", "half", "brain"])
                got = other.read(card.id, ["cond.q", "half", "brain"])
                assert all(torch.equal(got[name], wanted[name]) for name in wanted)
                assert other.entry(card.id).signature.tolist() == make().signature.tolist()


def test_import_evicts_nothing_and_claims_no_future(
    tmp_path: Path, store: Store, monkeypatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 4e9)
        for i in range(6):
            store.put(make(identity=f"{i:02x}", size=5000, seconds=1e9))
    store.export(tmp_path / "file")
    one = store.entries()[0].nbytes
    with Store(tmp_path / "small", 5 * one) as small:
        mine = small.put(make(identity="ff", size=5000, seconds=0.001))
        with pytest.raises(StoreError, match="leave no room"):
            small.import_file(tmp_path / "file")
        assert mine in {e.id for e in small.entries()} and len(small.entries()) > 2
        assert small.stats().bytes <= 5 * one
        assert all(entry.created <= time.time() for entry in small.entries())


def test_what_is_exported_is_checked_first(tmp_path: Path, store: Store) -> None:
    store.put(plain("01"))
    (path,) = payloads(store.folder)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RecordError, match="checksum"):
        store.export(tmp_path / "file", [store.entries()[0].id])
    assert not (tmp_path / "file").exists()
