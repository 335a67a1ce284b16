"""What the engine's tests share: a store, and a risk table that no measurement changes."""

from __future__ import annotations

import gaussian
import pytest
import torch
from hypothesis import settings

from carnator import matching
from carnator.store import Store

settings.register_profile("unhurried", deadline=None)  # a busy machine is no fault
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def subnormal_numbers():
    """The commands flush them to zero, for the whole process; Hypothesis wants them back."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store of its own for one test; closed-form models get their own risk table."""
    shipped = matching.table_for
    table = lambda a: gaussian.TABLE if a == "gaussian" else shipped(a)  # noqa: E731
    monkeypatch.setattr(matching, "table_for", table)
    with Store(tmp_path / "store") as made:
        yield made
