"""The session benchmark: what it asks for, how it counts, and runs of it on a tiny model."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import bars, command, creators, growth, overhead, session, studio
from benchmarks.batch import WORD_KINDS
from benchmarks.creators import Ask
from benchmarks.studio import Answer, Played, Studio
from carnator import matching
from carnator.demo import captions, host
from carnator.demo.model import EmbeddedModel
from carnator.demo.wan import WanConfig, WanTransformer
from carnator.derivative import derivative, relative_deviation
from carnator.recording import first_derivative
from carnator.request import Settings
from carnator.risk import RiskTable, Row
from carnator.store import Store

RED = captions.parse("red circle left on gray")
BLUE = captions.parse("blue square up and green circle down on white")
STEPS = 6


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = WanConfig(dim=24, ffn_dim=32, num_heads=2, num_layers=1)
    return EmbeddedModel(WanTransformer(config), "tiny")


@pytest.fixture
def trusting(monkeypatch):
    """A risk table that takes any donor, with three evaluations."""
    rows = (Row(3, 0.25, ((-3.0, 90.0, 90.0, 90.0), (0.0, 90.0, 90.0, 90.0))),)
    kinds = dict.fromkeys(("single", "single+cfg", "single+schedule"), rows)
    table = RiskTable("test", "", 1.7, 0.0, 1e9, kinds)
    monkeypatch.setattr(matching, "table_for", lambda architecture: table)
    monkeypatch.setattr(matching, "CEILING_D0", 1e9)


# What is asked for.


@pytest.mark.parametrize("kind", creators.KINDS)
def test_sessions_are_what_their_kind_says(kind):
    drawn = [creators.drawn(kind, i) for i in range(10)]
    assert drawn == [creators.drawn(kind, i) for i in range(10)]
    assert drawn[0] != creators.drawn(kind, 0, seed=6)
    for i, asks in enumerate(drawn):
        made = [a.change for a in asks]
        assert len(asks) == creators.LENGTH and made[0] == "first"
        assert made.count("repeat") == (i % 2 == 0)
        assert set(WORD_KINDS) <= set(made)
        seeds = {a.seed for a in asks}
        if kind in ("fixed", "mixed"):
            assert len(seeds) == 1
        else:
            assert len(seeds) == sum(c != "repeat" for c in made) and made.count("seed") == 1
        assert {a.policy for a in asks} == {"bank" if kind == "bank" else "keep"}
        wanted = 1 if kind == "mixed" else 3
        assert sum(made.count(c) for c in creators.SETTINGS) == wanted
        assert made.count("unrelated") == (creators.UNRELATED if kind == "mixed" else 0)


@pytest.mark.parametrize("kind", creators.KINDS)
def test_a_request_changes_one_thing_of_an_earlier_one(kind):
    names = ("caption", "cfg", "steps", "lora")
    for index in range(4):
        asks = creators.drawn(kind, index)
        for i, ask in enumerate(asks[1:], 1):
            earlier = asks[:i]
            if ask.change == "repeat":
                assert ask.asks_for() in {e.asks_for() for e in earlier}
                continue
            assert ask.asks_for() not in {e.asks_for() for e in earlier}
            differing = [{n for n in names if getattr(e, n) != getattr(ask, n)} for e in earlier]
            if ask.change == "seed":
                assert set() in differing
            else:
                assert {ask.change if ask.change in creators.SETTINGS else "caption"} in differing


def test_an_unknown_kind_of_session_is_refused():
    with pytest.raises(ValueError, match="use one of fixed, keep, bank, mixed"):
        creators.drawn("wild", 0)


# How it is played.


def test_everything_is_run_twice_and_counted(model, trusting):
    first = Ask("first", RED, 3, steps=STEPS)
    asks = [
        first,
        replace(first, change="lora", lora=0.05),
        replace(first, change="repeat"),
        replace(first, change="seed", seed=4),
    ]
    played = Studio(model, "balanced").play("fixed", 0, asks, random.Random(0))
    decisions = [a.decision for a in played.answers]
    assert decisions == ["miss", "hit", "exact", "miss"]
    assert [a.evaluations for a in played.answers] == [STEPS, 3, 1, STEPS]
    assert {a.dense_evaluations for a in played.answers} == {STEPS}
    assert [a.hit for a in played.answers] == [False, True, True, False]
    own, repeated = played.answers[1].psnr_db, played.answers[2].psnr_db
    assert own < repeated == 59.0
    for a in played.answers:
        assert 0 <= a.writing_seconds < a.seconds and a.dense_seconds > 0 and a.cpu_seconds > 0
    total = played.opening_seconds + sum(a.seconds for a in played.answers)
    assert played.seconds == pytest.approx(total) and played.opening_seconds > 0


def test_a_hit_from_bank_noise_is_held_against_its_own_dense_run(model, trusting, tmp_path):
    desk = Studio(model, "balanced")
    first = Ask("first", RED, 3, "bank", steps=STEPS)
    with Store(tmp_path) as store:
        missed = desk.answer(first, store, dense_first=True)
        again = desk.answer(replace(first, change="repeat"), store, dense_first=False)
    assert (missed.decision, missed.psnr_db) == ("miss", None)
    assert missed.dense_attributes == missed.attributes
    assert (again.decision, again.psnr_db) == ("exact", 59.0)


def test_a_refused_run_that_differs_stops_the_benchmark(model, tmp_path, monkeypatch):
    desk = Studio(model, "balanced")
    real = desk.generate

    def wrong(ask, **more):
        made = real(ask, **more)
        return made if "store" in more else replace(made, latent=made.latent + 1e-6)

    monkeypatch.setattr(desk, "generate", wrong)
    with (
        Store(tmp_path) as store,
        pytest.raises(overhead.Mismatch, match="differs from the dense one"),
    ):
        desk.answer(Ask("first", RED, 3, steps=STEPS), store, dense_first=True)


# How it is counted.


def answer(change, seconds, db=None, dense=1.0):
    decision = "miss" if db is None else "hit"
    made = 30 if db is None else 10
    return Answer(
        change, "", decision, made, 30, seconds, 0.1, dense, seconds / 2, dense, db, 0.8, 0.9
    )


@pytest.fixture
def sessions():
    plain = [answer("first", 1.1), answer("shape", 1.1)]
    return [
        Played("fixed", 0, 0.1, [answer("first", 1.1), answer("shape", 0.4, 33.0)]),
        Played("fixed", 1, 0.1, [answer("first", 1.1), answer("repeat", 0.2, 59.0)]),
        Played("keep", 0, 0.1, plain),
        Played("bank", 0, 0.1, plain),
        Played("mixed", 0, 0.1, [answer("first", 1.1), answer("shape", 0.4, 30.0)]),
        Played("mixed", 1, 0.1, plain),
    ]


def test_the_summary_by_hand(sessions):
    found = session.summarise(sessions, "balanced")
    # 4 dense seconds in 1.6 + 1.4 of Carnator's.
    assert found["fixed_seed_speedup"] == pytest.approx(4 / 3.0, abs=1e-4)
    # 1.6 + 2.3 against 4, and the second session alone 2.3 against 2.
    assert found["mixed_slowdown"] == pytest.approx(3.9 / 4 - 1, abs=1e-4)
    assert found["mixed_slowdown_worst"] == pytest.approx(0.15, abs=1e-4)
    assert (found["hit_rate"], found["tweak_hit_rate"]) == (1.0, 1.0)
    assert found["worst_hit_db"] == 30.0 and found["hits_below_floor"] == pytest.approx(1 / 3, 1e-3)
    assert (found["attributes_right"], found["dense_attributes_right"]) == (0.8, 0.9)
    fixed, keep = found["kinds"]["fixed"], found["kinds"]["keep"]
    assert fixed["evaluation_speedup"] == pytest.approx(120 / 80, abs=1e-4)
    assert fixed["cpu_speedup"] == pytest.approx(4 / 1.4, abs=1e-4)
    assert fixed["lowest_speedup"] == pytest.approx(2 / 1.6, abs=1e-4)
    assert fixed["changes"]["repeat"]["hits"] == 1 and fixed["worst_hit_db"] == 33.0
    assert (keep["hit_rate"], keep["worst_hit_db"], keep["hit_psnr_db"]) == (0.0, None, None)
    assert found["fixed_seed_cpu_speedup"] == fixed["cpu_speedup"]
    assert found["mixed_cpu_slowdown"] == pytest.approx(1.85 / 4 - 1, abs=1e-4)
    told = session.text("wan", found)
    assert "1.33x faster" in told and "disagree (fixed, keep, bank, mixed)" in told


def test_results_go_to_files(sessions, tmp_path):
    summary = session.summarise(sessions, "balanced")
    row = {key: 1.5 for key, _ in growth.COLUMNS}
    summary["growth"] = [{"records": n, "store_mb": 1.0, **row, "hit_ms": None} for n in (10, 100)]
    path = tmp_path / "out.json"
    command.save(path, {"summary": {"wan": summary}})
    assert json.loads(path.read_text())["summary"]["wan"] == summary
    assert growth.text(summary["growth"]).count("\n") == 2
    pytest.importorskip("matplotlib")
    bars.session_plot({"wan": summary}, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000


# Growth.


def test_filling_records_are_worse_donors_than_the_real_one(model, tmp_path):
    with Store(tmp_path) as store:
        made = host.generate(model, RED, seed=3, settings=Settings(), store=store)
        store.flush()
        (real,) = store.entries()
        filler = growth.Filler(store, real)
        for _ in range(6):
            store.put(filler.draft())
        entries = store.entries(real.partition)
        assert len({e.identity for e in entries}) == 7
        size = {e.nbytes // 100 for e in entries}  # names and numbers in the text differ
        assert max(size) - min(size) <= 3
        d = first_derivative(real, store).at(host.CFG)
        off = [relative_deviation(first_derivative(e, store).at(host.CFG), d) for e in entries]
        assert min(off) == 0 and all(0.01 < o < matching.CEILING_D0 for o in sorted(off)[1:])
        again = host.generate(model, RED, seed=3, settings=Settings(), store=store)
        assert again.report.decision == "exact" and torch.equal(again.latent, made.latent)


def test_the_probe_is_the_one_a_run_makes(model, tmp_path):
    bench = growth.Workbench(model, "balanced")
    with Store(tmp_path) as store:
        what = captions.parse(growth.OTHER)
        host.generate(model, what, seed=growth.SEED, settings=Settings(), store=store)
        store.flush()
        (entry,) = store.entries()
        probe, _, sigma = bench.probe
        assert probe.request.identity == entry.identity
        assert np.array_equal(probe.signature, entry.signature)
        first = derivative(probe.x, probe.evaluation.denoised, probe.sigma)
        assert relative_deviation(first, first_derivative(entry, store).at(host.CFG)) < 1e-5
        assert sigma == pytest.approx(entry.meta["sigmas"][1])


def test_measuring_leaves_the_store_as_it_was(model, trusting, monkeypatch, tmp_path):
    monkeypatch.setattr(growth, "MATCHES", 1)
    monkeypatch.setattr(growth, "QUICK_REPEATS", 1)
    with Store(tmp_path) as store:
        what = captions.parse(growth.PROMPT)
        host.generate(model, what, seed=growth.SEED, settings=Settings(), store=store)
        store.flush()
        (entry,) = store.entries()
        bench, filler = growth.Workbench(model, "balanced"), growth.Filler(store, entry)
        row = bench.measure(store, filler, 1)
        assert [e.id for e in store.entries()] == [entry.id]
        assert row["records"] == 1 and row["hit_ms"] > 0
        monkeypatch.setattr(matching, "CEILING_D0", -1.0)  # now every donor is refused
        assert bench.measure(store, filler, 1)["hit_ms"] is None


def test_the_store_grows(model, monkeypatch):
    for name in ("REPEATS", "QUICK_REPEATS", "MATCHES"):
        monkeypatch.setattr(growth, name, 1)
    rows = growth.grow(model, "balanced", (2, 5), quick=True)
    assert [row["records"] for row in rows] == [2, 5]
    assert rows[0]["store_mb"] < rows[1]["store_mb"]
    for row in rows:
        assert all(row[key] > 0 for key, _ in growth.COLUMNS if key != "hit_ms")
    assert growth.grow(model, "balanced", (), quick=True) == []
    with pytest.raises(ValueError, match="use rising sizes from 2"):
        growth.grow(model, "balanced", (5, 5), quick=True)


def test_time_is_taken_of_the_work_alone():
    out, spent = studio.timed(lambda: sum(range(10_000)))
    assert out == sum(range(10_000)) and spent.wall > 0 and spent.cpu > 0
