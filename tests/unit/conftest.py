"""What the engine's tests share: a store, and a risk table that no measurement changes."""

from __future__ import annotations

import gaussian
import pytest

from carnator import matching
from carnator.store import Store


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store of its own for one test; closed-form models get their own risk table."""
    shipped = matching.table_for
    table = lambda a: gaussian.TABLE if a == "gaussian" else shipped(a)  # noqa: E731
    monkeypatch.setattr(matching, "table_for", table)
    with Store(tmp_path / "store") as made:
        yield made
