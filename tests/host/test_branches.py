"""Guidance in every form the host gives it: joined, split, switching in mid-run, none; batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from sampling import CAPTION, SMALL, TWEAK, flush, last_report, sample
from trial import attach, held, psnr, same, tried

HIT = ["miss", "hit", "exact"]


class Free:
    """Stands for the host's free memory: says at each call whether the branches fit together."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.turns = itertools.cycle(pattern)

    def restart(self) -> None:
        self.turns = itertools.cycle(self.pattern)

    def __call__(self, *args: Any, **kwargs: Any) -> float:
        return 0.0 if next(self.turns) == "j" else 1e18


@pytest.fixture
def passes(small_model, monkeypatch):
    """The batch size of every call of the model."""
    seen: list[int] = []
    original = type(small_model.model).apply_model

    def watched(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(x))
        return original(self, x, *args, **kwargs)

    monkeypatch.setattr(type(small_model.model), "apply_model", watched)
    return seen


@pytest.mark.parametrize("pattern", ["j", "s", "jjjsss", "sj"])
def test_joined_split_and_switching(small_model, store, monkeypatch, passes, pattern):
    free = Free(pattern)
    monkeypatch.setattr(small_model.model, "memory_required", free)

    def run(model: Any, words: str) -> torch.Tensor:
        free.restart()  # each run meets the same memory
        return sample(model, words)

    assert tried(small_model, attach(small_model, store), store, run) == HIT
    assert set(passes) == {2} if pattern == "j" else {1} if pattern == "s" else {1, 2}


@pytest.mark.parametrize(("first", "then"), [("j", "s"), ("s", "j"), ("jjs", "sjj")])
def test_a_donor_made_in_another_form(small_model, store, monkeypatch, first, then):
    monkeypatch.setattr(small_model.model, "memory_required", Free(first))
    ours = attach(small_model, store)
    sample(ours)
    flush(store)
    monkeypatch.setattr(small_model.model, "memory_required", Free(then))
    got = sample(ours, TWEAK)
    assert last_report().decision == "hit"
    monkeypatch.setattr(small_model.model, "memory_required", Free("j"))
    assert psnr(got, sample(small_model, TWEAK)) >= 25


@pytest.mark.parametrize("cfg", [1.0, 0.0, 2.5, 7.0])
def test_guidance_scales(small_model, store, cfg):
    def run(model: Any, words: str) -> torch.Tensor:
        return sample(model, words, cfg=cfg)

    assert tried(small_model, attach(small_model, store), store, run) == HIT


@pytest.mark.parametrize(("made", "asked"), [(2.5, 3.0), (2.5, 1.0), (1.0, 2.5)])
def test_another_guidance_scale(small_model, store, made, asked):
    ours = attach(small_model, store)
    sample(ours, cfg=made)
    flush(store)
    report = held(lambda m, w: sample(m, w, cfg=asked), small_model, ours, CAPTION)
    assert report.decision in ("hit", "miss")


@pytest.mark.parametrize("cfg", [1.0, 2.5])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_batches(small_model, store, batch, cfg):
    def run(model: Any, words: str) -> torch.Tensor:
        return sample(model, words, cfg=cfg, shape=(batch, *SMALL[1:]))

    decisions = tried(small_model, attach(small_model, store), store, run)
    assert decisions == (HIT if batch == 1 else ["dense"] * 3)
    if batch > 1:
        assert f"a batch of {batch}" in last_report().reason


def test_a_batch_beside_single_clips(small_model, store):
    """A single clip's record is no donor to a batch, nor the other way round."""
    ours = attach(small_model, store)
    sample(ours)
    flush(store)
    pair = (2, *SMALL[1:])
    assert same(sample(ours, shape=pair), sample(small_model, shape=pair))
    flush(store)
    assert len(store.open().entries()) == 1


@pytest.mark.parametrize("shape", [(1, 16, 4, 8, 10), (1, 16, 3, 8, 8), (1, 16, 4, 6, 8)])
def test_another_resolution_or_length(small_model, store, shape):
    ours = attach(small_model, store)
    sample(ours)
    flush(store)

    def run(model: Any, words: str) -> torch.Tensor:
        return sample(model, words, shape=shape)

    assert tried(small_model, ours, store, run) == HIT
    assert held(sample, small_model, ours, CAPTION).decision == "exact"


def test_steps_and_schedule_may_change(small_model, store):
    ours = attach(small_model, store)
    sample(ours, steps=10)
    flush(store)
    for steps in (8, 12):
        report = held(lambda m, w, n=steps: sample(m, w, steps=n), small_model, ours, CAPTION)
        assert report.decision == "hit", report.reason
