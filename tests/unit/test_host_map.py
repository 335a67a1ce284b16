"""tests/host/README.md says which test covers what; every test it names must be there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
MAP = TESTS / "host" / "README.md"
NAMED = re.compile(r"`(unit/)?(test_\w+)::(test_\w+)`")
TABLES = ("Combinations that must pass", "At home in every graph", "Faults of comparable packs")
MUST_PASS = (
    "cond and uncond joined, split, switching in mid-run",
    "cfg 1",
    "batch 1, 2, 3",
    "image-to-video concat channels",
    "nested audio-video latents",
    "two KSamplerAdvanced stages with two models",
    "heun, res_2s, euler_ancestral, uni_pc",
    "context windows, two and more",
    "calls after guidance by SLG and PAG",
    "node before and after LoRA, two LoRAs, another strength",
    "hooks with keyframes",
    "the node twice in a chain",
    "together with EasyCache",
    "Cancel at step k, then again",
    "out of memory at step k, then again",
    "another resolution, another number of frames",
    "run, remove the node, run: as a fresh process",
    "`--cache-none`, `--cache-ram`",
    "torch.compile before and after",
    "store folder deleted while running",
    "two processes on one store",
    "corrupt record",
    "NaN record",
    "read-only disk",
    "fp32 model, no aliasing",
    "multi-GPU threads, simulated",
)


def rows(text: str, title: str) -> dict[str, str]:
    """What a table covers -> its cell of tests."""
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [line.strip("|").split("|") for line in lines]
    return {what.strip(): tests for what, tests in cells}


def missing(text: str) -> list[str]:
    """Tests that a text names and that are not there."""
    gone = []
    for unit, file, test in NAMED.findall(text):
        path = TESTS / ("unit" if unit else "host") / f"{file}.py"
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        if test not in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}:
            gone.append(f"{path.relative_to(TESTS)}::{test}")
    return gone


def test_every_named_test_exists() -> None:
    text = MAP.read_text(encoding="utf-8")
    assert len(NAMED.findall(text)) > 80
    assert missing(text) == []


@pytest.mark.parametrize("text", ["`test_nowhere::test_x`", "`test_attach::test_no_such_thing`"])
def test_a_test_that_is_gone_is_found(text: str) -> None:
    assert missing(text)


def test_every_line_has_a_test() -> None:
    text = MAP.read_text(encoding="utf-8")
    for title in TABLES:
        for what, tests in rows(text, title).items():
            assert NAMED.search(tests), f"{title}: {what!r} names no test"
    found = rows(text, TABLES[0])
    assert tuple(found) == MUST_PASS
    assert all("`test_" in tests for tests in found.values()), "a line without a test in the host"
