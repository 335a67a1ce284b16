"""What the tests of the store share: drafts, and a look at the folder from outside."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import numpy as np
import torch

from carnator.store import Draft, RecordError, Store
from carnator.store.folder import SUBFOLDER


def make(partition: str = "aa", identity: str = "01", size: int = 1000, **meta: object) -> Draft:
    generator = torch.Generator().manual_seed(int(identity, 16))
    tensors = {
        "cond.q": torch.randint(-127, 128, (4, size), generator=generator, dtype=torch.int8),
        "cond.scale": torch.rand(4, 1, generator=generator),
        "half": torch.randn(2, 3, 4, generator=generator).half(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "brain": torch.randn(5, generator=generator).bfloat16(),
    }
    signature = np.linspace(-1, 1, 9).astype(np.float16)
    return Draft(
        partition, identity, {"seconds": 2.5, "sigmas": [1.0, 0.0], **meta}, tensors, signature
    )


def plain(identity: str) -> Draft:
    tensors = {"a": torch.arange(300).reshape(3, 100).float(), "b": torch.ones(8, dtype=torch.int8)}
    return Draft("aa", identity, {"seconds": 1.0}, tensors, np.ones(4, np.float16))


def sql(folder: Path, query: str, *args: object) -> list[tuple]:
    connection = sqlite3.connect(folder / SUBFOLDER / "cache.db", isolation_level=None)
    try:
        return connection.execute(query, args).fetchall()
    finally:
        connection.close()


def payloads(folder: Path) -> list[Path]:
    found = [Path(top) / name for top, _, names in os.walk(folder) for name in names]
    return sorted(path for path in found if path.suffix == ".val")


def exercise(folder: Path) -> list:
    """Everything a session does with a store; the entries it ends up with."""
    with Store(folder) as store:
        for entry in store.entries():
            try:
                tensors = store.read(entry.id, ["a", "b"])
                assert torch.equal(tensors["a"], plain("01").tensors["a"])
            except RecordError:
                pass
            store.note_hit(entry.id, 1.0)
        store.submit(plain("03"))
        assert store.flush(20)
        store.entries("aa")
        store.stats()
        store.rebuild()
        store.size_limit = 6000
        store.put(plain("04"))
        store.size_limit = 1 << 30
        return store.entries()


def identities(entries: list) -> set[str]:
    return {entry.identity for entry in entries}
