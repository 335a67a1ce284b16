"""The store's benchmark: writing, reading and matching, next to two references.

The references keep the same tensors in plain safetensors files, flushed to the device, and in
diskcache as it comes, which pickles, and flushes nothing. These pickles are made and read by the
benchmark's own process alone, in a folder that is deleted at the end.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diskcache
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from carnator.demo.model import EmbeddedModel
from carnator.matching import match
from carnator.ranking import Ranking, smallest
from carnator.recording import first_derivative, load
from carnator.request import Settings
from carnator.store import Draft, Store

from .store_material import CFG, Library, numbered

REFERENCE_MOST = 1000  # records up to which the slow references are asked
LIMIT = 4 * 2**30


def ms(work: Callable[..., Any], *args: Any) -> float:
    """Milliseconds of a call."""
    began = time.perf_counter()
    work(*args)
    return 1000 * (time.perf_counter() - began)


def writing(draft: Draft, folder: Path, turns: int) -> tuple[dict[str, Any], Store]:
    """Milliseconds per record of the three, in turns, the order changing every time. Returns the
    store as well, with the records in it."""
    store = Store(folder / "store", LIMIT, disk_floor=0)
    pickled = diskcache.Cache(str(folder / "pickled"), eviction_policy="none", size_limit=LIMIT)
    tensors = dict(draft.tensors)

    def plain(turn: int) -> None:
        path = folder / f"plain-{turn}.safetensors"
        save_file(tensors, path)
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)

    ways: dict[str, Callable[[int], Any]] = {
        "store": lambda turn: store.put(numbered(draft, turn)),
        "safetensors": plain,
        "diskcache (pickle)": lambda turn: pickled.set(str(turn), tensors),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in tqdm(range(turns), desc="writing", unit="record"):
        names = list(ways)
        for name in names[turn % 3 :] + names[: turn % 3]:
            times[name].append(ms(ways[name], turn))
    ratios = [a / b for a, b in zip(times["store"], times["safetensors"], strict=True)]
    found = {name: round(statistics.median(values), 1) for name, values in times.items()}
    pickled.close()
    return {"ms": found, "ratio": round(statistics.median(ratios), 2), "turns": turns}, store


def reading(draft: Draft, store: Store, folder: Path, turns: int) -> dict[str, Any]:
    """Milliseconds per derivative of a hit: found, read, checked and decoded, at the donor's own
    guidance and at another. The references read all tensors and check and decode nothing."""
    sigmas = draft.meta["sigmas"]
    (entry, *_) = store.entries()

    def hit(cfg: float) -> None:
        store.relax()
        path, _ = load(store, entry, sigmas, cfg=cfg)
        for sigma in sigmas:
            path.at(sigma, cfg)

    def plain() -> None:
        with safe_open(str(folder / "plain-0.safetensors"), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                file.get_tensor(name).clone()

    def pickled() -> None:
        with diskcache.Cache(str(folder / "pickled")) as cache:
            cache["0"]

    ways = {
        "store": lambda: hit(CFG),
        "store, other CFG": lambda: hit(CFG + 1),
        "safetensors": plain,
        "diskcache (pickle)": pickled,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in tqdm(range(turns), desc="reading", unit="hit"):
        for name, way in ways.items():
            times[name].append(ms(way) / len(sigmas))
    one = [ms(lambda: store.read(entry.id, ["d.7"])) for _ in range(turns)]
    first = [ms(lambda: first_derivative(entry, store)) for _ in range(turns)]
    return {
        "ms_per_derivative": {n: round(statistics.median(v), 2) for n, v in times.items()},
        "one_tensor_ms": round(statistics.median(one), 2),
        "first_derivative_ms": round(statistics.median(first), 2),
    }


def matching(model: EmbeddedModel, folder: Path, counts: tuple[int, ...], turns: int) -> list[dict]:
    """Milliseconds of a match, and of the store's part in a miss, by number of records."""
    rows = []
    store = Store(folder / "library", LIMIT, disk_floor=0)
    library = Library(store, model, np.random.default_rng(1))
    with tqdm(total=counts[-1], desc="filling", unit="record") as bar:
        for count in counts:
            for _ in library.grow(count):
                bar.update()
            rows.append(_matched(library, count, turns, folder))
    store.close()
    return rows


def _matched(library: Library, count: int, turns: int, folder: Path) -> dict[str, Any]:
    store, probe = library.store, library.probe
    settings, partition = Settings(), probe.request.partition

    def find() -> None:
        verdict = match(probe, settings, store)
        assert verdict.d0 is not None and len(verdict.donors) == 4, "no donors were found"

    def refused_part() -> None:
        for record_id in store.shelf(partition).nearest(probe.signature, 64)[:4]:
            entry = store.entry(record_id)
            assert entry is not None
            store.read(record_id, ["first"])

    after, part = [], []
    for turn in range(turns):
        store.put(library.draft(10**6 + turn))  # a session: every miss is recorded
        after.append(ms(find))
        part.append(ms(refused_part))
    for entry in store.entries(partition)[:turns]:
        store.delete(entry.id)
    store.relax()
    row: dict[str, Any] = {
        "records": count,
        "match_ms": round(statistics.median(after), 2),
        "first_match_ms": round(ms(find), 1),
        "same_match_ms": round(statistics.median(ms(find) for _ in range(turns)), 2),
        "store_part_ms": round(statistics.median(part), 2),
    }
    if count <= REFERENCE_MOST:
        row.update(_references(library, count, folder))
    return row


def _references(library: Library, count: int, folder: Path) -> dict[str, float]:
    """The same search over plain files and over pickled values, each read anew."""
    place = folder / f"files-{count}"
    place.mkdir()
    cache = diskcache.Cache(str(folder / f"pickles-{count}"))
    for number in range(count):
        made = library.draft(number)
        tensors = {**made.tensors, "signature": torch.from_numpy(made.signature)}
        save_file(tensors, place / f"{number}")
        with cache.transact():
            cache[number] = {"signature": made.signature, "tensors": made.tensors}
    target = library.probe.signature

    def files() -> None:
        signatures = []
        for number in range(count):
            with safe_open(str(place / f"{number}"), "pt") as file:
                signatures.append(file.get_tensor("signature").numpy())
        for i in smallest(Ranking(signatures).distances(target), 4):
            with safe_open(str(place / f"{i}"), "pt") as file:
                file.get_tensor("first").clone()

    def pickles() -> None:
        values = [cache[number] for number in range(count)]
        smallest(Ranking([value["signature"] for value in values]).distances(target), 4)

    found = {"safetensors_ms": round(ms(files), 1), "diskcache_pickle_ms": round(ms(pickles), 1)}
    cache.close()
    return found
