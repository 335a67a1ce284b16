"""Processes that die while they write. Run as a program: ``store_farm.py PART FOLDER``.

One process imports everything once and forks its victims, each of which opens the store for
itself; no store is open here while it forks. An assertion that fails ends the program with 1.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from records import payloads, sql

from carnator.store import Draft, Store
from carnator.store.folder import SUBFOLDER

NUMBERS = 20_000
RECORD = 4 * NUMBERS + 6000  # bytes one record takes, and a little more
ROUNDS = int(os.environ.get("CARNATOR_KILLS", "25"))
LINES = int(os.environ.get("CARNATOR_KILLS", "25"))


def draft(identity: str, partition: str = "aa") -> Draft:
    tensors = {"a": torch.full((NUMBERS,), float(int(identity, 16)))}
    meta = {"seconds": 1.0 + int(identity, 16) % 7, "label": identity}
    return Draft(partition, identity, meta, tensors, np.ones(4, np.float16))


def sound(store: Store) -> dict[str, str]:
    """Identity by id of all records, each read whole."""
    for record_id, fault in store.verify():
        assert not fault, fault
        value = store.read(record_id, ["a"])["a"]
        entry = store.entry(record_id)
        assert entry is not None and torch.equal(value, draft(entry.identity).tensors["a"])
    return {entry.id: entry.identity for entry in store.entries()}


def on_disk(folder: Path) -> int:
    total = 0
    for path in payloads(folder):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def finished(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(folder: Path) -> None:
    """kill -9 at random instants: what was acknowledged stays, nothing else piles up."""
    rng = random.Random(5)
    with Store(folder, 1 << 30, disk_floor=0) as store:
        store.put(draft("0"))
        began = time.perf_counter()
        for identity in ("1", "2", "3"):
            store.put(draft(identity))
        one = (time.perf_counter() - began) / 3  # seconds, on this machine
        acknowledged = set(sound(store))
    for turn in range(ROUNDS):
        read, write = os.pipe()

        def work(turn: int = turn, write: int = write) -> None:
            with Store(folder, 1 << 30, disk_floor=0) as store:
                os.write(write, b"ready")
                for i in range(1000):
                    os.write(write, store.put(draft(f"{turn:04x}{i:04x}")).encode())

        child = fork(work)
        os.close(write)
        with os.fdopen(read, "rb") as stream:
            stream.read(5)
            time.sleep(rng.uniform(0.0, 5 * one))
            os.kill(child, signal.SIGKILL)
            assert finished(child) == -signal.SIGKILL
            told = stream.read().decode()
        acknowledged |= {told[i : i + 32] for i in range(0, len(told), 32)}
        if turn % 40 == 39:
            with Store(folder, 1 << 30, disk_floor=0) as store:
                there = sound(store)
                assert acknowledged <= there.keys(), f"lost {acknowledged - there.keys()}"
                assert len(payloads(folder)) <= len(there) + 1, "files pile up"
                acknowledged.add(store.put(draft("ffff")))
                acknowledged &= {entry.id for entry in store.entries()}  # "ffff" was replaced
                assert len(payloads(folder)) == store.stats().records
    assert len(acknowledged) > ROUNDS // 4, "the victims hardly wrote"
    print(f"{ROUNDS} kills, {len(acknowledged)} records acknowledged, none lost")


def lines(folder: Path) -> None:
    """Death at any line of the store's code, while a record takes the place of an older one of the
    same request, and while one makes another go."""
    died = seen = 0
    for identity, room in (("2", 4.5), ("4", 3.5)):
        limit, template = int(room * RECORD), folder / f"template{identity}"
        with Store(template, limit, disk_floor=0) as store:
            for made in ("1", "2", "3"):
                store.put(draft(made))
            before = set(sound(store).values())
        counted = folder / "count"
        assert (
            finished(fork(_victim(_copy(template, folder / "run"), limit, identity, 0, counted)))
            == 0
        )
        total = int(counted.read_text())
        assert total > 300, "the trace sees too little"
        seen += total
        for at in range(1, total, max(1, 2 * total // LINES)):
            where = _copy(template, folder / "run")
            died += finished(fork(_victim(where, limit, identity, at, counted))) == 9
            assert on_disk(where) <= limit, at
            with Store(where, limit, disk_floor=0) as store:
                there = sorted(sound(store).values())
                lost = before - set(there)
                assert len(there) == len(set(there)), (at, there)
                assert not lost if identity == "2" else len(lost) <= 1, (at, there)
                store.put(draft("5"))
                assert len(payloads(where)) == store.stats().records, at
                assert on_disk(where) <= store.stats().bytes <= limit, at
    assert died >= LINES // 2, "hardly any died"
    print(f"{died} deaths within {seen} lines")


def _victim(where: Path, limit: int, identity: str, at: int, counted: Path) -> Callable[[], None]:
    """Work that ends the process at the ``at``th line of the store's code."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line":
            count += 1
            if count == at:
                os._exit(9)
        return trace

    def work() -> None:
        with Store(where, limit, disk_floor=0) as store:
            sys.settrace(trace)
            store.put(draft(identity))
            sys.settrace(None)
            counted.write_text(str(count))

    return work


FILES = tuple(
    f"carnator/store/{p.name}" for p in Path(__file__).parents[2].glob("carnator/store/*")
)


def _copy(template: Path, where: Path) -> Path:
    shutil.rmtree(where, ignore_errors=True)
    shutil.copytree(template, where)
    return where


def damage(folder: Path) -> None:
    """Three processes meet a damaged index at once."""
    with Store(folder, disk_floor=0) as store:
        for identity in ("1", "2", "3"):
            store.put(draft(identity))
        store.pin(next(iter(sound(store))))
    for turn in range(12):
        with Store(folder, disk_floor=0) as store:
            before = len(store.entries())
        database = folder / SUBFOLDER / "cache.db"
        if turn % 3 == 0:
            database.write_bytes(b"damaged" * 3000)
        elif turn % 3 == 1:
            database.unlink()
        else:
            sql(folder, "CREATE TABLE foreign_one (x)")

        def work(turn: int = turn) -> None:
            with Store(folder, disk_floor=0) as store:
                assert len(store.entries()) >= 3
                store.put(draft(f"{turn:x}{os.getpid():06x}"))
                store.note_hit(store.entries()[0].id, 1.0)

        children = [fork(work) for _ in range(3)]
        assert [finished(child) for child in children] == [0, 0, 0]
        with Store(folder, disk_floor=0) as store:
            assert len(sound(store)) == before + 3
            assert sum(card.pinned for card in store.cards()) == 1
    print("12 rebuilds by three processes at once, nothing lost")


def crowd(folder: Path) -> None:
    """Two processes write 500 records into a store that holds half of them."""
    limit = 250 * RECORD

    def writer(number: int) -> Callable[[], None]:
        def work() -> None:
            with Store(folder, limit, disk_floor=0) as store:
                for i in range(250):
                    record_id = store.put(draft(f"{number}{i:04x}"))
                    store.note_hit(record_id, 1.0)

        return work

    children = {fork(writer(number)) for number in (1, 2)}
    most = 0
    while children:
        most = max(most, on_disk(folder))
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            assert status == 0
            children.discard(done)
        time.sleep(0.005)
    assert most <= limit, f"{most} bytes of {limit}"
    with Store(folder, limit, disk_floor=0) as store:
        there, stats = sound(store), store.stats()
        assert 200 < len(there) == len(payloads(folder))
        assert stats.bytes <= limit and stats.hits == 500
    print(f"500 records written, {len(there)} kept, at most {most / limit:.1%} of the limit")


def readonly(folder: Path) -> None:
    """A folder that cannot be written, for a user whom file modes bind."""
    folder.chmod(0o755)
    with Store(folder, disk_floor=0) as store:
        store.put(draft("1"))

    def work() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            Store(folder)
        except ValueError as error:
            assert "cannot be written" in str(error), error
        else:
            raise AssertionError("a read-only folder was opened")

    for path in folder.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    folder.chmod(0o555)
    assert finished(fork(work)) == 0
    print("refused")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
