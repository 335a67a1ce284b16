"""Search by likeness and by request, and the memory it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import make, sql

from carnator.ranking import Ranking, smallest
from carnator.store import Store, memory
from carnator.store.brief import Brief
from carnator.store.memory import Kept
from carnator.store.shelf import SPARE, Shelf, Shelves

RNG = np.random.default_rng(4)


def signatures(count: int, length: int = 20) -> list[np.ndarray]:
    """Nearly parallel ones, on very different scales."""
    scale = 10.0 ** RNG.uniform(-2, 2, length)
    return [((10 + RNG.standard_normal(length)) * scale).astype(np.float16) for _ in range(count)]


def by_definition(target: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    matrix = np.stack(others).astype(np.float64)
    spread = matrix.std(0)
    spread[spread < 1e-6] = np.inf
    return np.square((matrix - target.astype(np.float64)) / spread).sum(1)


def shelf(named: dict[str, np.ndarray]) -> Shelf:
    return Shelf({name: brief(name, s) for name, s in named.items()})


def brief(name: str, signature: np.ndarray, created: float = 0.0, identity: str = "i") -> Brief:
    return Brief(name, identity, 1, created, 1.0, signature)


@pytest.mark.parametrize("count", [1, 2, 5, 300])
def test_distances_are_those_of_the_definition(count: int) -> None:
    others = signatures(count)
    target = signatures(1)[0] if count < 5 else others[3]
    wanted = by_definition(target, others)
    assert np.allclose(Ranking(others).distances(target), wanted, atol=1e-3, rtol=1e-3)


def test_constant_numbers_do_not_count() -> None:
    others = [np.array([1.0, 5.0, i], np.float16) for i in range(4)]
    near = Ranking(others).distances(np.array([9.0, -3.0, 2.0], np.float16))
    assert smallest(near, 4)[0] == 2 and near[2] == pytest.approx(0, abs=1e-4)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 40))
def test_the_smallest_come_first_and_the_earlier_of_equals(values, most):
    expected = sorted(range(len(values)), key=lambda i: (values[i], i))[:most]
    found = smallest(np.array(values, float), most)
    assert [values[i] for i in found] == [values[i] for i in expected]
    assert len(values) > most or found == expected


def test_nearest_by_likeness_whatever_came_and_went_since() -> None:
    names = {f"{i:03}": s for i, s in enumerate(signatures(200))}
    current = shelf(dict(list(names.items())[:100]))
    target = names["150"]
    current.nearest(target, 4)  # prepares the search
    for step in range(1, 30):
        there = dict(list(names.items())[3 * step : 100 + 3 * step])
        current = current.after(there, lambda name: brief(name, names[name]))
        assert len(current) == 100
        wanted = by_definition(target, list(there.values()))
        found = current.nearest(target, 3)
        assert set(found) <= set(there)
        assert found[0] == list(there)[int(wanted.argmin())]
        assert len(current.nearest(target, 1000)) == 100
    assert SPARE < 3 * 29, "the search was prepared anew on the way"


def test_a_shelf_is_not_changed_by_the_next() -> None:
    first = shelf({"a": signatures(1)[0]})
    second = first.after(["a", "b", "gone"], lambda n: brief(n, RNG_ONE) if n == "b" else None)
    assert (len(first), len(second)) == (1, 2)


RNG_ONE = np.ones(20, np.float16)


def test_signatures_of_another_length_are_left_out() -> None:
    short, long = signatures(3, 5), signatures(3, 9)
    both = shelf({f"{i}": s for i, s in enumerate([*short, *long])})
    assert both.nearest(short[1], 9)[0] == "1" and set(both.nearest(short[1], 9)) == set("012")
    assert both.nearest(np.zeros(4, np.float16), 9) == Shelf({}).nearest(RNG_ONE, 3) == []
    empty = np.zeros(0, np.float16)
    assert shelf({"a": empty}).nearest(empty, 2) == ["a"]


def test_the_newest_of_a_request_comes_first() -> None:
    records = [brief("a", RNG_ONE, 3.0, "x"), brief("b", RNG_ONE, 5.0, "x"), brief("c", RNG_ONE)]
    assert Shelf({b.id: b for b in records}).same_request("x") == ["b", "a"]


def test_memory_of_shelves_is_bounded() -> None:
    one = shelf({f"{i}": s for i, s in enumerate(signatures(10))})
    shelves = Shelves(3 * one.nbytes)
    for name in "abcd":
        shelves.keep(name, 1, one)
    assert [shelves.get(name) is not None for name in "abcd"] == [False, True, True, True]
    shelves.get("b")
    shelves.keep("e", 1, one)
    assert shelves.get("b") is not None and shelves.get("c") is None
    tiny = Shelves(1)
    tiny.keep("a", 1, one)
    assert tiny.get("a") is not None, "the one in use stays"
    shelves.clear()
    assert shelves.get("e") is None


def test_kept_values_are_bounded_and_the_oldest_use_goes() -> None:
    kept: Kept[int] = Kept(2)
    kept.keep("a", 1)
    kept.keep("b", 2)
    assert kept.get("a") == 1
    kept.keep("c", 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c"), len(kept)) == (1, None, 3, 2)
    kept.drop("a")
    assert kept.get("a") is None


# In a store.


def test_a_store_s_shelf_follows_every_change_by_anybody(tmp_path: Path) -> None:
    with Store(tmp_path) as one, Store(tmp_path) as two:
        assert len(one.shelf("aa")) == 0
        first = two.put(make(identity="01"))
        two.put(make("bb", "02"))
        assert one.shelf("aa").same_request("01") == [first]
        assert one.shelf("aa") is one.shelf("aa"), "kept as long as nothing changes"
        two.note_hit(first, 1.0)
        two.flush()
        kept = one.shelf("aa")
        second = one.put(make(identity="03"))
        assert one.shelf("aa").nearest(make().signature, 9) in ([first, second], [second, first])
        assert len(kept) == 1
        two.delete(first)
        assert one.shelf("aa").same_request("01") == []
        two.clear()
        assert len(one.shelf("aa")) == len(one.shelf("bb")) == 0


def test_a_damaged_brief_is_made_anew_from_the_entry(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        record_id = store.put(make())
        sql(tmp_path, "UPDATE Cache SET value = x'00' WHERE key LIKE 'brief:%'")
        store.relax()
        shelf = store.shelf("aa")
        assert shelf.same_request("01") == [record_id]
        assert shelf.nearest(make().signature, 1) == [record_id]
        sql(tmp_path, "DELETE FROM Cache WHERE key LIKE 'entry:%'")
        store.relax()
        assert len(store.shelf("aa")) == 0


def test_memory_is_given_back_under_pressure(tmp_path: Path, monkeypatch) -> None:
    class Short:
        available = memory.LEAST_FREE - 1

    class Psutil:
        @staticmethod
        def virtual_memory():
            return Short

    with Store(tmp_path) as store:
        record_id = store.put(make())
        store.read(record_id, ["half"])
        store.shelf("aa")
        store.entries()
        assert len(store._index._entries) == 1 and store._index._shelves.get("aa") is not None
        monkeypatch.setattr(memory, "psutil", None)
        assert not memory.under_pressure()
        monkeypatch.setattr(memory, "psutil", Psutil)
        assert memory.under_pressure()
        store.submit(make(identity="02"))
        assert store._index._shelves.get("aa") is None
        assert len(store._reader._places) == 0
        assert store.flush(20)
        assert len(store.entries()) == 2
