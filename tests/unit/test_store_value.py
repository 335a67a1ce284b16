"""What records are worth, and which go first: hand-worked cases and properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carnator.store.brief import MOST_SECONDS, Brief, brief_of, pack_brief, unpack_brief
from carnator.store.errors import RecordError
from carnator.store.record import Entry
from carnator.store.value import HALF_LIFE, Usage, value, victims

NOW = 1e9
NONE = Usage()
SIGNATURE = np.linspace(-2, 2, 7).astype(np.float16)


def brief(name: str = "a", nbytes: int = 100, seconds: float = 10.0, created: float = NOW) -> Brief:
    return Brief(name, "i", nbytes, created, seconds, SIGNATURE)


def test_value_is_expected_seconds_per_byte() -> None:
    base = value(brief(), NONE, NOW)
    assert base == pytest.approx(math.log(10.0 / 100))
    assert value(brief(nbytes=200), NONE, NOW) == pytest.approx(math.log(10.0 / 200))
    assert value(brief(seconds=20.0), NONE, NOW) == pytest.approx(math.log(20.0 / 100))
    assert value(brief(), NONE, NOW + HALF_LIFE) == pytest.approx(math.log(5.0 / 100))
    used = Usage().add(30.0, NOW)
    assert value(brief(), used, NOW) == pytest.approx(math.log(40.0 / 100))
    assert value(brief(), used, NOW + 2 * HALF_LIFE) == pytest.approx(math.log(10.0 / 100))
    # Two hits a half-life apart: the first counts half when the second is made.
    twice = Usage().add(8.0, NOW).add(8.0, NOW + HALF_LIFE)
    assert twice.credit == pytest.approx(12.0)
    assert value(brief(), twice, NOW + HALF_LIFE) == pytest.approx(math.log((5.0 + 12.0) / 100))


def test_many_old_hits_count_less_than_a_few_fresh_ones() -> None:
    old = fresh = Usage()
    for _ in range(20):
        old = old.add(1.0, NOW - 8 * HALF_LIFE)
    for _ in range(3):
        fresh = fresh.add(1.0, NOW)
    made = NOW - 10 * HALF_LIFE
    assert old.hits > fresh.hits
    assert value(brief(created=made), fresh, NOW) > value(brief(created=made), old, NOW)


def test_a_clock_set_back_fades_nothing() -> None:
    assert value(brief(), NONE, NOW - 1e6) == value(brief(), NONE, NOW)
    assert Usage().add(4.0, NOW).add(4.0, NOW - 1e6).credit == 8.0
    assert math.isfinite(value(brief(created=0.0), NONE, 1e12))


def test_victims_by_hand() -> None:
    records = [brief("x", created=3e8), brief("y", created=2e8), brief("z", created=1e8)]
    assert victims(records, {}, NOW, excess=150) == ["z", "y"]
    assert victims(records, {}, NOW, excess=150, keep={"z"}) == ["y", "x"]
    assert victims(records, {}, NOW, excess=1, first={"x"}) == ["x"]
    assert victims(records, {"z": Usage().add(1e6, NOW)}, NOW, excess=1) == ["y"]
    assert victims(records, {}, NOW, excess=0) == []
    assert victims(records, {}, NOW, excess=-5, number=2) == ["z", "y"]
    assert victims(records, {}, NOW, excess=10_000) == ["z", "y", "x"]


times = st.floats(0, 4e9)
seconds = st.floats(1e-6, MOST_SECONDS)
usages = st.builds(
    lambda hits: next(u for u in [_used(hits)]),
    st.lists(st.tuples(st.floats(0, 1e5), times), max_size=6),
)


def _used(hits: list[tuple[float, float]]) -> Usage:
    usage = Usage()
    for saved, when in hits:
        usage = usage.add(saved, when)
    return usage


@st.composite
def stores(draw):
    count = draw(st.integers(0, 12))
    records = [
        brief(f"{i:02x}", draw(st.integers(1, 10**9)), draw(seconds), draw(times))
        for i in range(count)
    ]
    used = {r.id: draw(usages) for r in records if draw(st.booleans())}
    keep = {r.id for r in records if draw(st.booleans())}
    return records, used, keep, draw(times)


@given(stores(), st.integers(-(10**9), 10**10), st.integers(-3, 14))
def test_victims_free_enough_keep_pins_and_are_the_least_valuable(given_store, excess, number):
    records, used, keep, now = given_store
    chosen = victims(records, used, now, excess=excess, number=number, keep=keep)
    sizes = {r.id: r.nbytes for r in records}
    loose = [r for r in records if r.id not in keep]
    assert not keep & set(chosen) and len(chosen) == len(set(chosen))
    freed = sum(sizes[i] for i in chosen)
    assert (freed >= excess and len(chosen) >= number) or len(chosen) == len(loose)
    if chosen:  # not one more than needed
        without = freed - sizes[chosen[-1]]
        assert without < excess or len(chosen) - 1 < number
    worth = {r.id: value(r, used.get(r.id, NONE), now) for r in records}
    stay = [worth[r.id] for r in loose if r.id not in chosen]
    assert not stay or not chosen or max(worth[i] for i in chosen) <= min(stay)


@given(stores(), st.integers(1, 10**10))
def test_victims_do_not_depend_on_the_order_of_the_records(given_store, excess):
    records, used, keep, now = given_store
    chosen = victims(records, used, now, excess=excess, keep=keep)
    assert chosen == victims(records[::-1], used, now, excess=excess, keep=keep)


@given(seconds, times, usages, times, st.floats(0.1, 1e5))
def test_another_hit_never_makes_a_record_worth_less(dense, made, used, now, saved):
    assume(now >= used.last)
    record = brief(seconds=dense, created=made)
    assert value(record, used.add(saved, now), now) >= value(record, used, now) - 1e-9


@given(usages)
def test_usage_survives_its_row(used):
    assert Usage.unpack(used.pack()) == used


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda s: s.encode("utf-8", "replace")))
def test_any_row_unpacks_to_some_usage(row):
    made = Usage.unpack(row)
    assert min(made.hits, made.seconds_saved, made.last, made.credit) >= 0


@pytest.mark.parametrize(
    "row", [None, b"[1]", b"[-1,0,0,0]", b"[1,1e999,0,0]", b"[true,0,0,0]", b'["1",0,0,0]', b"\xff"]
)
def test_odd_usage_rows_count_as_never_used(row) -> None:
    assert Usage.unpack(row) == Usage()


# Briefs.


@given(
    st.from_regex(r"[0-9a-f]{1,128}", fullmatch=True),
    st.integers(0, 2**62),
    times,
    seconds,
    st.lists(st.floats(-6e4, 6e4, width=16), max_size=40),
)
def test_a_brief_survives_its_row(identity, nbytes, created, dense, numbers):
    made = Brief("a", identity, nbytes, created, dense, np.array(numbers, np.float16))
    back = unpack_brief(pack_brief(made), "a")
    assert (back.identity, back.nbytes, back.created, back.seconds) == (
        identity,
        nbytes,
        created,
        dense,
    )
    assert np.array_equal(back.signature, made.signature)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_brief_is_refused(at, flip):
    row = bytearray(pack_brief(brief()))
    row[at % len(row)] ^= flip
    with pytest.raises(RecordError):
        unpack_brief(bytes(row), "a")


@given(st.binary(max_size=200))
def test_anything_else_is_no_brief(row):
    with pytest.raises(RecordError):
        unpack_brief(row, "a")


@pytest.mark.parametrize(
    ("claimed", "held"),
    [(2.5, 2.5), (1e9, MOST_SECONDS), (-1, 1.0), (0, 1.0), ("much", 1.0), (None, 1.0), (True, 1.0)],
)
def test_claimed_seconds_are_held_to_a_range(claimed, held) -> None:
    entry = Entry("a" * 32, "p", "i", {"seconds": claimed}, SIGNATURE, 100, NOW)
    assert brief_of(entry).seconds == held
    assert brief_of(entry).nbytes > 100, "index rows count"
