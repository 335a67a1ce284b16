"""The attention benchmark's own arithmetic."""

from __future__ import annotations

import argparse

import pytest
from tqdm import tqdm

from benchmarks import attention, mask_sizes


def test_random_masks_have_the_density_asked_for_and_keep_the_diagonal():
    mask = attention.random_mask(4, 64, 0.3)
    assert float(mask.float().mean()) == pytest.approx(0.3, abs=0.01)
    assert bool(mask.diagonal(dim1=1, dim2=2).all())
    assert len(set(mask.sum(-1).flatten().tolist())) > 5  # lists of many lengths


def test_heads_are_cut_to_the_work_a_turn_may_take():
    assert attention.heads_within(4e9, 12, 1000, 100) == 10
    assert attention.heads_within(1.0, 12, 1000, 100) == 1
    assert attention.heads_within(1e15, 12, 1000, 100) == 12


def test_a_row_compares_with_dense_in_the_same_turn(monkeypatch):
    spent = {"dense": iter([1.0, 3.0, 5.0, 5.0, 2.0, 2.0]), "sparse": iter([1.0, 2.0, 0.5])}
    monkeypatch.setattr(
        attention,
        "seconds",
        lambda run, device: next(
            spent["dense" if run.func is attention.dense_attention else "sparse"]
        ),
    )
    options = argparse.Namespace(
        quick=True, heads=2, head_dim=8, block=16, densities=[0.5], backends=["gather"], turns=3
    )
    with tqdm(disable=True) as bar:
        row = attention.measure(64, options, "cpu", bar)[0]
    # Dense before and after: (1 + 3) / 2 over 1, (5 + 5) / 2 over 2, (2 + 2) / 2 over 0.5.
    assert (row["lowest"], row["ratio_to_dense"], row["highest"]) == (2.0, 2.5, 4.0)
    assert row["share_of_ideal"] == pytest.approx(2.5 * row["density"], abs=2e-3)
    assert (row["backend"], row["tokens"], row["heads"]) == ("gather", 64, 2)


def test_sizes_are_scaled_to_the_whole_backbone(monkeypatch):
    monkeypatch.setattr(mask_sizes, "dense_seconds", lambda tokens: 1.0)
    small = mask_sizes.Geometries("small", 4, 6, (4, 8, 8), 1, 2)
    found = mask_sizes.size_of(small)
    assert found["bitmap_mib"] == round(3 * 4 * 6 * 32 * 4 / 2**20, 2)
    assert 0 < found["sparse_heads"] <= 1 and 0 < found["density"] <= 0.6
