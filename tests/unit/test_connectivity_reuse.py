"""Connectivity over a run: recorded on one, tried and reused on another."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attention_maps import DIM, GRID, HEADS, LAYERS, SCALE, exact_map, local_attention

from carnator import connectivity
from carnator.attention import KeyLists, sparse_attention
from carnator.connectivity import (
    Geometry,
    Layer,
    Measured,
    Packed,
    Recorder,
    Reuse,
    Shared,
    Static,
    fuse,
    layout,
    observe,
    pack,
    recall,
    row_mass,
    sample_rows,
)

WIDE = (8, 16, 16)


@pytest.fixture(scope="module")
def recorded():
    """A donor's packed masks of local attention, over 2048 tokens."""
    at = layout(WIDE, block=32)
    static = Static(at, HEADS, 0.1)
    recorder = Recorder(at, LAYERS, HEADS, 2)
    q, k = local_attention(at)
    for anchor in range(2):
        for i in range(LAYERS):
            recorder.see(anchor, i, q, k)
    return at, static, Packed(recorder.pack([0.9, 0.5], static), recorder.geometry, static)


def test_a_donors_masks_serve_a_target_like_it(recorded):
    at, static, donor = recorded
    reuse = Reuse(at, LAYERS, HEADS, static, donor)
    q, k = (t[None] for t in local_attention(at))
    dense = connectivity.dense_layers([0.1] * LAYERS)
    for sigma in (0.85, 0.6):
        for i in range(LAYERS):
            found = reuse.connections(i, sigma, q, k)
            assert (found is None) == (i in dense)
            if found is not None:
                mass = row_mass(q, k, at, sample_rows(at, 999), SCALE)
                held = recall(mass, found.lists.mask, sample_rows(at, 999))
                assert bool((held >= 0.94).all()) and found.lists.density < 0.6
                v = torch.randn(1, HEADS, at.tokens, DIM)
                out = sparse_attention(q, k, v, found.lists, order=found.order, backend="gather")
                exact = F.scaled_dot_product_attention(q, k, v)
                assert float((out - exact).norm() / exact.norm()) < 0.15
    use = reuse.report[1]
    assert use.calls == 2 and use.heads["fused"] == 4 and use.least_recall >= 0.95


def lying(kind: str, at: connectivity.Layout) -> Layer:
    mask = torch.zeros(HEADS, at.blocks, at.blocks, dtype=torch.bool)
    if kind == "random":
        generator = torch.Generator().manual_seed(5)
        mask = torch.rand(mask.shape, generator=generator) < 0.3
    elif kind == "shifted":
        q, k = local_attention(at, shift=0.4)
        mask = observe(q, k, at, SCALE).mask
    return Layer(mask, torch.ones(HEADS, dtype=torch.bool))


@pytest.mark.parametrize("kind", ["random", "empty", "shifted"])
def test_masks_that_lie_are_caught_and_the_template_or_dense_stands_in(recorded, kind):
    at, static, _ = recorded
    geometry = Geometry.of(at, LAYERS, HEADS)
    donor = Packed(pack([[lying(kind, at)] * LAYERS], [0.9], geometry, static), geometry, static)
    q, k = (t[None] for t in local_attention(at))
    reuse = Reuse(at, LAYERS, HEADS, static, donor)
    found = reuse.connections(2, 0.9, q, k)
    assert reuse.report[2].heads["fused"] == 0
    if found is not None:  # together with the template it may do
        held = (exact_map(q[0], k[0], at) * found.lists.mask).sum(-1).mean(-1)
        assert kind == "shifted" and bool((held >= 0.94).all())
    mask = observe(q[0], k[0], at, SCALE).mask
    shared = Layer(mask, torch.ones(HEADS, dtype=torch.bool))
    good = Measured(Packed(pack([[shared] * LAYERS], [0.9], geometry, static), geometry, static))
    reuse = Reuse(at, LAYERS, HEADS, good, donor)
    found = reuse.connections(2, 0.9, q, k)
    assert reuse.report[2].heads == {"fused": 0, "union": HEADS, "dense": 0}
    assert bool((found.lists.mask | ~mask).all())


def test_a_mask_that_stops_holding_is_given_up_on_the_way(recorded):
    at, static, donor = recorded
    reuse = Reuse(at, LAYERS, HEADS, static, donor)
    q, k = (t[None] for t in local_attention(at))
    moved, _ = (t[None] for t in local_attention(at, shift=0.4))
    assert reuse.connections(2, 0.9, q, k) is not None
    assert reuse.connections(2, 0.9, moved, k) is None
    assert reuse.connections(2, 0.9, q, k) is None  # and not taken up again at this anchor
    assert reuse.connections(2, 0.5, q, k) is not None
    assert reuse.connections(2, 0.5, torch.full_like(q, math.nan), k) is None


def test_what_turns_out_to_be_the_targets_own_widens_masks_on_the_way(recorded):
    at, static, donor = recorded
    q, k = (t[None] for t in local_attention(at))
    reuse = Reuse(at, LAYERS, HEADS, static, donor)
    before = reuse.connections(2, 0.9, q, k).lists.mask
    moved, _ = (t[None] for t in local_attention(at, shift=0.4))
    assert reuse.connections(3, 0.9, moved, k) is None
    own = torch.zeros(at.blocks, dtype=torch.bool)
    own[[3, 40]] = True
    reuse.retarget(own)
    after = reuse.connections(2, 0.9, q, k).lists.mask
    assert torch.equal(after, before | own[:, None] | own[None])
    assert reuse.connections(3, 0.9, q, k) is None, "what was given up stays so"
    reuse.retarget(None)
    assert torch.equal(reuse.connections(2, 0.9, q, k).lists.mask, after)


def test_one_head_may_be_dense_beside_a_sparse_one(recorded):
    at, static, donor = recorded
    q, k = local_attention(at)
    q = torch.stack([q[0], torch.zeros_like(q[0])])[None]
    reuse = Reuse(at, LAYERS, HEADS, static, donor)
    found = reuse.connections(2, 0.9, q, k[None])
    assert found.lists.full == [False, True]
    assert reuse.report[2].heads == {"fused": 1, "union": 0, "dense": 1}


def test_a_shared_template_is_what_most_records_have(recorded):
    at, static, _ = recorded
    geometry = Geometry.of(at, LAYERS, HEADS)
    every = torch.ones(HEADS, dtype=torch.bool)
    masks = [
        torch.rand(HEADS, at.blocks, at.blocks, generator=torch.Generator().manual_seed(i)) < 0.4
        for i in range(3)
    ]
    records = [
        Packed(
            pack([[None, Layer(m, every)] + [None] * 4], [0.9], geometry, static), geometry, static
        )
        for m in masks
    ]
    shared = Shared(records)
    assert torch.equal(shared.layer(0, 1), torch.stack(masks).sum(0) >= 2)
    assert torch.equal(shared.layer(0, 2), static.layer(0, 2)), "none of them has masks there"
    assert shared.nearest(0.5) == 0 and shared.digest != Shared(records[:2]).digest


def test_without_a_donor_the_template_serves(recorded):
    at, _, donor = recorded
    q, k = (t[None] for t in local_attention(at))
    reuse = Reuse(at, LAYERS, HEADS, Measured(donor))
    assert reuse.connections(0, 0.9, q, k) is None
    found = reuse.connections(2, 0.9, q, k)
    assert found is not None and found.lists.density < 0.6


def test_calls_over_other_tokens_stay_dense_and_other_donors_are_refused(recorded):
    at, static, donor = recorded
    reuse = Reuse(at, LAYERS, HEADS, static, donor)
    q, k = (t[None] for t in local_attention(at))
    assert reuse.connections(2, 0.9, q[:, :, :100], k[:, :, :100]) is None
    assert reuse.connections(2, 0.9, q, k[:, :, :100]) is None
    assert reuse.connections(2, 0.9, q[:, :1], k[:, :1]) is None
    with pytest.raises(ValueError, match="not of"):
        Reuse(at, LAYERS + 1, HEADS, static, donor)


def test_anchors_are_the_nearest_steps_but_the_first_two():
    sigmas = [1.0, 0.99, 0.96, 0.9, 0.79, 0.6, 0.45, 0.2]
    assert connectivity.anchor_steps(sigmas) == {2: 0.96, 4: 0.79, 6: 0.45}
    assert connectivity.anchor_steps(sigmas[:2]) == {}
    assert connectivity.anchor_steps([1.0, 0.5, 0.2]) == {2: 0.2}


def test_masks_work_with_lists_of_keys():
    at = layout(GRID)
    lists = KeyLists(fuse(torch.zeros(1, at.blocks, at.blocks, dtype=torch.bool), at), at.block)
    assert lists.counts[0] == at.always.sum(-1).tolist()
