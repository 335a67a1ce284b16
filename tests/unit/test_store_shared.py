"""The store in the background, under its limit, and shared by threads and processes."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from records import make, payloads

from carnator.store import RecordError, Store, StoreError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "store") as opened:
        yield opened


def test_submit_writes_in_the_background(store: Store, caplog) -> None:
    gate = threading.Event()
    store._writer.add(lambda: gate.wait(20) and None)
    for i in range(5):
        store.submit(make(identity=f"{i:02x}"))
    assert store.entries() == []
    assert not store.flush(0.01)
    gate.set()
    assert store.flush(20)
    assert len(store.entries("aa")) == 5
    bad = make()
    bad.tensors["half"][0] = float("nan")
    with caplog.at_level(logging.WARNING, "carnator"):
        store.submit(bad)
        store.submit(bad)
        store.submit(None)  # type: ignore[arg-type]
        assert store.flush(20)
    assert sum("NaN or infinity" in r.message for r in caplog.records) == 1
    assert len(store.entries("aa")) == 5


def test_submit_is_bounded_in_memory(store: Store, monkeypatch, caplog) -> None:
    gate = threading.Event()
    store._writer.add(lambda: gate.wait(20) and None)
    monkeypatch.setattr(store._writer, "_limit", 10_000)
    with caplog.at_level(logging.WARNING, "carnator"):
        store.submit(make(identity="01", size=2000))
        store.submit(make(identity="02", size=2000))
    gate.set()
    store.flush(20)
    assert [e.identity for e in store.entries()] == ["01"]
    assert any("busy" in r.message for r in caplog.records)


def test_close_writes_what_is_queued_and_refuses_later_use(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for i in range(3):
        store.submit(make(identity=f"{i:02x}"))
    store.close()
    store.close()
    store.submit(make())
    assert store.entries() == []
    with pytest.raises(StoreError, match="closed"):
        store.put(make())
    with pytest.raises(RecordError):
        store.read("0" * 32, ["half"])
    with Store(tmp_path) as again:
        assert len(again.entries()) == 3


def test_interpreter_exit_runs_pending_jobs(tmp_path: Path) -> None:
    # The writer's file alone: a whole import of torch would be most of this test's time.
    code = (
        "import importlib.util, pathlib, sys, time\n"
        "spec = importlib.util.spec_from_file_location('writer', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['writer'] = module\n"
        "spec.loader.exec_module(module)\n"
        "writer = module.Writer(1000)\n"
        "writer.add(lambda: time.sleep(0.3))\n"
        "writer.add(lambda: pathlib.Path(sys.argv[2]).write_text('done'))\n"
    )
    source, done = ROOT / "carnator/store/writer.py", tmp_path / "done"
    subprocess.run([sys.executable, "-c", code, str(source), str(done)], check=True, timeout=300)
    assert done.read_text() == "done"


def test_eviction_keeps_the_limit_and_the_most_valuable(tmp_path: Path) -> None:
    limit = 60_000
    with Store(tmp_path, limit) as store:
        keep = store.put(make(identity="ff", size=2000))
        for _ in range(50):
            store.note_hit(keep, 2.0)
        store.flush()
        for i in range(20):
            last = store.put(make(identity=f"{i:02x}", size=2000))
            assert store.stats().bytes <= limit
        ids = {e.id for e in store.entries()}
        assert {keep, last} <= ids
        assert 2 < len(ids) < 10
        assert len(payloads(tmp_path)) == len(ids)
        store.size_limit = 25_000
        store.put(make(identity="aa", size=2000))
        assert store.stats().bytes <= 25_000


def test_open_shares_one_instance_per_folder(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "a")
    same = Store.open(str(tmp_path / "b" / ".." / "a"), 12345)
    other = Store.open(tmp_path / "b")
    try:
        assert same is store
        assert store.size_limit == 12345
        assert other is not store
        store.close()
        assert Store.open(tmp_path / "a") is not store
    finally:
        Store.open(tmp_path / "a").close()
        other.close()


def test_two_stores_and_processes_on_one_folder(tmp_path: Path) -> None:
    code = (
        "import sys, numpy, torch\n"
        "from carnator.store import Draft, Store\n"
        "with Store(sys.argv[1]) as store:\n"
        "    for i in range(20):\n"
        "        d = Draft('aa', f'1{i}', {}, {'t': torch.ones(99)}, numpy.empty(0))\n"
        "        store.note_hit(store.put(d), 1.0)\n"
    )
    with Store(tmp_path) as one, Store(tmp_path) as two:
        mine = one.put(make("bb"))
        assert [e.id for e in two.entries("bb")] == [mine]
        assert two.delete(mine)
        assert one.entries("bb") == []
        other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
        written = 0
        while other.poll() is None or written < 5:
            one.put(make("aa", f"2{written % 5}", size=10))
            written += 1
            for entry in two.entries("aa"):
                if entry.identity.startswith("1"):
                    assert torch.equal(two.read(entry.id, ["t"])["t"], torch.ones(99))
            time.sleep(0.02)
        assert other.returncode == 0
        assert len(one.entries("aa")) == 25
        assert one.stats().hits == 20


def test_threads_share_a_store(store: Store) -> None:
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(5):
                record_id = store.put(make(identity=f"{number}{i}"))
                assert store.read(record_id, ["scalar"])["scalar"] == 3.5
                assert record_id in {e.id for e in store.entries("aa")}
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert faults == []
    assert len(store.entries()) == 20
