"""Processes killed while they write, several at once, and folders that cannot be written.

``store_farm.py`` holds the parts: they need processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import store_farm

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def farm(part: str, folder: Path) -> str:
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "store_farm.py"), part, str(folder)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_kill_at_random_instants_loses_no_committed_record(tmp_path: Path) -> None:
    assert f"{store_farm.ROUNDS} kills" in farm("kill", tmp_path)


def test_death_at_any_line_leaves_a_sound_store_within_its_limit(tmp_path: Path) -> None:
    assert "deaths" in farm("lines", tmp_path)


def test_processes_that_meet_a_damaged_index_at_once_lose_nothing(tmp_path: Path) -> None:
    assert "nothing lost" in farm("damage", tmp_path)


def test_two_processes_write_more_than_fits_and_keep_the_limit(tmp_path: Path) -> None:
    assert "500 records" in farm("crowd", tmp_path)


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    # Not below tmp_path, which another user may not even enter.
    with tempfile.TemporaryDirectory() as folder:
        assert "refused" in farm("readonly", Path(folder))
