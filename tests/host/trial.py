"""One combination of nodes, tried as a user meets it: a run, one changed word, the first again.

Whatever the combination, the same must hold of every run: bit for bit what it is without Carnator,
or a hit that keeps the floor asked for; and one line in the log that says which and why, with the
same words in the Report node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from harness import part
from sampling import CAPTION, TWEAK, flush, last_report, sample
from torch import Tensor

FLOOR = 25.0  # dB

Run = Callable[[Any, str], Any]


class Lines(logging.Handler):
    """What Carnator writes into the log while it is in use as a context."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Lines:
        self._logger = logging.getLogger("carnator")
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


def strict() -> Any:
    """Settings whose floor every hit of a trial is held against."""
    return part("carnator.request").Settings("custom", FLOOR)


def attach(model: Any, store: Any) -> Any:
    return part("nodes.host").attach(model, strict(), store)


def parts_of(latent: Any) -> list[Tensor]:
    return list(latent.unbind()) if latent.is_nested else [latent]


def same(one: Any, other: Any) -> bool:
    return all(map(torch.equal, parts_of(one), parts_of(other)))


def psnr(got: Tensor, expected: Tensor) -> float:
    """Latent PSNR in dB; the range is four times the root mean square, as for models without a
    table of their own."""
    error = (got - expected).double().square().mean()
    return float(10 * torch.log10(16 * expected.double().square().mean() / error))


def held(run: Run, plain: Any, ours: Any, words: str, floor: float = FLOOR) -> Any:
    """Run both ways, assert what must hold of every run, and give Carnator's report."""
    expected = run(plain, words)
    with Lines() as log:
        got = run(ours, words)
    report = last_report()
    told = [line for line in log.lines if line.startswith("[Carnator] ") and report.reason in line]
    assert report.reason and len(told) == 1, log.lines
    assert "internal error" not in " ".join(log.lines)
    shown = part("nodes.report").CarnatorReport.execute({"samples": got}).args[1]
    assert report.reason in shown and f"Decision: {report.decision}" in shown
    assert part("nodes.reports").find(got) is report
    if report.decision == "hit":
        assert report.evaluations < report.dense_evaluations
        assert psnr(got, expected) >= floor, (report.text(), psnr(got, expected))
    else:
        assert same(got, expected), report.text()
    return report


def tried(
    plain: Any, ours: Any, store: Any, run: Run = sample, first: str = CAPTION, then: str = TWEAK
) -> list[str]:
    """The decisions on a first run, on one with a changed word, and on the first repeated."""
    decisions = []
    for words in (first, then, first):
        decisions.append(held(run, plain, ours, words).decision)
        flush(store)
    return decisions
