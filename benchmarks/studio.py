"""Plays a creator's session twice, without Carnator and with it, and times everything.

Every request is made without Carnator and with it, in an order that is drawn. Carnator's seconds
are the wall time of all of it: opening the store, evaluations, matching, predictions, recording,
and the background writing, which is waited for after every request, so that it cannot slow down
the dense run beside it. Processor seconds, of all threads, are taken too: other work on the
machine changes them less.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from carnator.demo import host, quality
from carnator.demo.model import EmbeddedModel, with_lora
from carnator.request import Settings
from carnator.store import Store

from .batch import latent_peak, psnr_each
from .creators import Ask
from .metrics import CAP_DB
from .overhead import Mismatch

T = TypeVar("T")


class Spent(NamedTuple):
    """Seconds on the clock, and of the processor."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Answer:
    """What became of a request. ``seconds`` and ``cpu_seconds`` include the writing; ``psnr_db``
    (latent, at most 59) is None where nothing was reused."""

    change: str
    prompt: str
    decision: str
    evaluations: int
    dense_evaluations: int
    seconds: float
    writing_seconds: float
    dense_seconds: float
    cpu_seconds: float
    dense_cpu_seconds: float
    psnr_db: float | None
    attributes: float
    dense_attributes: float

    @property
    def hit(self) -> bool:
        return self.psnr_db is not None


@dataclass(frozen=True)
class Played:
    """A session. ``opening_seconds`` went into opening its store, and are part of its time."""

    kind: str
    index: int
    opening_seconds: float
    answers: list[Answer]

    @property
    def seconds(self) -> float:
        return self.opening_seconds + sum(a.seconds for a in self.answers)

    @property
    def dense_seconds(self) -> float:
        return sum(a.dense_seconds for a in self.answers)


def timed(work: Callable[[], T]) -> tuple[T, Spent]:
    wall, cpu = time.perf_counter(), time.process_time()
    out = work()
    return out, Spent(time.perf_counter() - wall, time.process_time() - cpu)


class Studio:
    """A model, with the LoRAs that its sessions ask for: loading one is no part of a request."""

    def __init__(self, model: EmbeddedModel, preset: str, bar: tqdm | None = None):
        self.model, self.preset, self.bar = model, preset, bar
        self._patched: dict[float, EmbeddedModel] = {0.0: model}

    def patched(self, lora: float) -> EmbeddedModel:
        if lora not in self._patched:
            self._patched[lora] = with_lora(self.model, lora)
        return self._patched[lora]

    def generate(self, ask: Ask, **more: Any) -> host.Result:
        model = self._patched[ask.lora]
        about = {"seed": ask.seed, "cfg": ask.cfg, "steps": ask.steps, **more}
        return host.generate(model, ask.caption, **about)

    def play(self, kind: str, index: int, asks: Sequence[Ask], rng: random.Random) -> Played:
        """Run a session; ``rng`` draws who goes first."""
        for ask in asks:
            self.patched(ask.lora)
        with tempfile.TemporaryDirectory() as folder:
            opened, opening = timed(lambda: Store(folder))
            with opened as store:
                answers = []
                for ask in asks:
                    answers.append(self.answer(ask, store, rng.random() < 0.5))
                    if self.bar is not None:
                        self.bar.update()
        return Played(kind, index, round(opening.wall, 5), answers)

    def answer(self, ask: Ask, store: Store, dense_first: bool) -> Answer:
        settings = Settings(preset=self.preset, noise_policy=ask.policy)
        plain = partial(timed, lambda: self.generate(ask))
        if dense_first:
            dense, dense_spent = plain()
        made, spent = timed(lambda: self.generate(ask, settings=settings, store=store))
        _, writing = timed(store.flush)
        if not dense_first:
            dense, dense_spent = plain()
        report = made.report
        assert report is not None
        hit = report.decision in ("hit", "exact")
        if not torch.equal(made.noise, dense.noise):  # the bank's
            dense = self.generate(ask, noise=made.noise) if hit else made
        elif not hit and not torch.equal(made.latent, dense.latent):
            raise Mismatch(f"A refused run ({report.reason}) differs from the dense one.")
        (db,) = psnr_each(made.latent, dense.latent, latent_peak(self.model))
        return Answer(
            ask.change,
            str(ask.caption),
            report.decision,
            report.evaluations,
            report.dense_evaluations,
            round(spent.wall + writing.wall, 5),
            round(writing.wall, 5),
            round(dense_spent.wall, 5),
            round(spent.cpu + writing.cpu, 5),
            round(dense_spent.cpu, 5),
            round(min(db, CAP_DB), 3) if hit else None,
            round(quality.attributes_right(made.clip, ask.caption), 4),
            round(quality.attributes_right(dense.clip, ask.caption), 4),
        )
