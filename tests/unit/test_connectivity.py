"""Connectivity: the order of tokens, observing, templates, fusing, verifying."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attention_maps import DIM, GRID, HEADS, SCALE, exact_map, local_attention, some_layer
from hypothesis import given, settings
from hypothesis import strategies as st

from carnator import connectivity
from carnator.connectivity import (
    Geometry,
    Measured,
    Packed,
    Static,
    fuse,
    judge,
    layout,
    majority,
    observe,
    pack,
    recall,
    row_mass,
    sample_rows,
    target_blocks,
)
from carnator.connectivity.observe import block_scores

# --- the layout --------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9)),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(1, 40),
)
def test_a_layout_orders_every_token_once_and_keeps_text_and_neighbours(grid, before, after, block):
    at = layout(grid, before, after, block)
    video = math.prod(grid)
    assert sorted(at.order.tolist()) == list(range(video + before + after))
    assert at.blocks == -(-at.tokens // block)
    is_text = (at.order < before) | (at.order >= before + video)
    padded = F.pad(is_text, (0, at.blocks * block - at.tokens)).view(at.blocks, block)
    assert torch.equal(at.text, padded.any(-1))
    assert bool(at.always[at.text].all()) and bool(at.always[:, at.text].all())
    assert bool(at.always.diagonal().all())


def test_blocks_are_compact_boxes():
    at = layout((8, 16, 16), block=32)
    places = torch.stack(torch.meshgrid(*map(torch.arange, at.grid), indexing="ij"), -1)
    boxes = places.view(-1, 3)[at.order].view(at.blocks, 32, 3)
    volume = (boxes.amax(1) - boxes.amin(1) + 1).prod(-1)
    assert bool((volume == 32).all())


def test_the_same_place_a_box_earlier_and_later_is_kept():
    at = layout((6, 4, 4), block=16)
    frames = torch.arange(96) // 16
    of = torch.empty(96, dtype=torch.long)
    of[at.order] = torch.arange(96) // 16
    assert (frames[at.order].view(6, 16).amax(1) == frames[at.order].view(6, 16).amin(1)).all()
    for frame in range(6):
        here = of[frame * 16]
        near = {int(of[f * 16]) for f in (frame - 1, frame, frame + 1) if 0 <= f < 6}
        assert set(at.always[here].nonzero().flatten().tolist()) == near


def test_real_geometries_need_no_padding_but_at_the_end():
    for grid, blocks in (((21, 30, 52), 256), ((21, 45, 80), 591)):
        at = layout(grid)
        assert (at.block, at.blocks) == (128, blocks)
        assert float(at.always.float().mean()) < 0.03
    assert connectivity.block_for(256) == 8 and connectivity.block_for(10) == 8


@pytest.mark.parametrize(
    "sizes", [((0, 4, 4), 0, 0, 8), ((1, 2, 2), -1, 0, 8), ((1, 2, 2), 0, 0, 0)]
)
def test_a_layout_of_nothing_is_refused(sizes):
    with pytest.raises(ValueError, match=r"is none|1 or more"):
        layout(*sizes)


# --- observing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [0, 20])
def test_row_mass_is_the_exact_attention_of_the_rows(text):
    at = layout(GRID, text, 0, 16)
    q, k = local_attention(at)
    rows = sample_rows(at, 3)
    assert len(set(rows.tokens.tolist())) == 64 and int(rows.blocks.max()) == at.blocks - 1
    mass = row_mass(q[None], k[None, :1], at, rows, SCALE)[0]
    share = torch.softmax(q @ k.transpose(1, 2) * SCALE, -1)
    for i in (0, 20, 63):
        token, block = int(rows.tokens[i]), int(rows.blocks[i])
        assert int(at.order[block * 16 : block * 16 + 16].eq(token).sum()) == 1
        for j in (0, 7, at.blocks - 1):
            columns = at.order[j * 16 : j * 16 + 16]
            expected = share[:, token, columns].sum(-1)
            torch.testing.assert_close(mass[:, i, j], expected, atol=1e-6, rtol=0)


def test_rows_move_with_the_turn():
    at = layout(GRID)
    assert not torch.equal(sample_rows(at, 1).tokens, sample_rows(at, 2).tokens)
    assert torch.equal(sample_rows(at, 1).tokens, sample_rows(at, 1).tokens)


def test_pooled_scores_are_exact_when_every_token_is_a_part():
    at = layout((3, 5, 5), 3, 0, 8)
    q, k = local_attention(at)
    scores = block_scores(q, k, at, SCALE, parts=8)
    torch.testing.assert_close(scores, exact_map(q, k, at), atol=1e-5, rtol=0)


@pytest.mark.parametrize("text", [0, 13])
def test_an_observed_mask_holds_what_was_asked_for_with_few_blocks(text):
    at = layout((8, 16, 16), 0, text, 32)
    q, k = local_attention(at)
    seen = observe(q, k, at, SCALE)
    held = (exact_map(q, k, at) * seen.mask).sum(-1).mean(-1)
    assert bool(seen.sparse.all()) and bool((held > 0.95).all())
    assert bool((seen.mask | ~at.always).all())
    assert float(seen.mask.float().mean()) < 0.5
    # A head that looks more narrowly needs fewer.
    density = seen.mask.float().mean((1, 2))
    assert float(density[1]) < float(density[0])


def test_a_head_that_looks_everywhere_is_not_sparse():
    at = layout(GRID, block=8)
    seen = observe(torch.zeros(1, 256, DIM), torch.zeros(1, 256, DIM), at, SCALE)
    assert not bool(seen.sparse.any())
    assert float(seen.recall) == pytest.approx(0.5, abs=0.1)
    assert float(seen.mask.float().mean()) <= 0.5 + float(at.always.float().mean())


# --- templates, fusing, verifying --------------------------------------------------------------


def test_the_static_template_keeps_the_nearest_blocks():
    at = layout((4, 16, 16), block=16)
    mask = Static(at, HEADS, 0.25).layer(0, 0)
    assert mask.shape == (HEADS, at.blocks, at.blocks)
    assert 0.25 <= float(mask.float().mean()) < 0.3
    assert bool((mask[0] | ~at.always).all())
    far = torch.cdist(at.centres[:, 1:], at.centres[:, 1:])
    assert far[mask[0]].mean() < far[~mask[0]].mean()


def test_a_measured_template_is_what_most_runs_share():
    at = layout(GRID)
    layers = [some_layer(at, seed) for seed in range(3)]
    for layer in layers:
        layer.sparse[:] = torch.tensor([True, False])
    shared = majority(layers)
    votes = torch.stack([layer.mask[0] for layer in layers]).sum(0)
    assert torch.equal(shared.mask[0], votes >= 2)
    assert shared.sparse.tolist() == [True, False]
    assert majority([None, None, layers[0]]) is None
    assert majority([None, layers[0], layers[0]]) is not None
    static, geometry = Static(at, HEADS), Geometry.of(at, 1, HEADS)
    template = Measured(Packed(pack([[shared]], [0.9], geometry, static), geometry, static))
    assert torch.equal(template.layer(0, 0)[0], shared.mask[0])
    assert torch.equal(template.layer(0, 0)[1], static.layer(0, 0)[1])
    assert template.digest != static.digest and len(template.digest) == 16


def test_target_specific_tokens_open_their_rows_and_columns():
    at = layout((4, 8, 8), 5, 0, 8)
    weight = torch.ones(2, 1, 4, 16, 16)
    weight[1, 0, 2, 4:8, 4:8] = 0.0  # four tokens of one frame, in one sample of the batch
    target = target_blocks(weight, at)
    place = torch.zeros(at.tokens, dtype=torch.bool)
    place[5:].view(4, 8, 8)[2, 2:4, 2:4] = True
    touched = F.pad(place[at.order], (0, at.blocks * 8 - at.tokens)).view(at.blocks, 8)
    assert torch.equal(target, touched.sum(-1) >= 2) and 1 <= int(target.sum()) <= 4
    donor = torch.zeros(HEADS, at.blocks, at.blocks, dtype=torch.bool)
    kept = fuse(donor, at, target)[0]
    i = int(target.nonzero()[0])
    assert bool(kept[i].all()) and bool(kept[:, i].all())
    assert torch.equal(kept, at.always | target[:, None] | target[None])
    assert torch.equal(fuse(donor, at)[1], at.always)
    assert not bool(target_blocks(torch.ones(1, 1, 4, 16, 16), at).any())


def test_image_latents_have_a_scope_too():
    at = layout((1, 8, 8), block=8)
    assert bool(target_blocks(torch.zeros(1, 1, 16, 16), at).all())


def test_first_and_densest_late_layers_stay_dense():
    densities = [0.1] * 30
    densities[4], densities[28], densities[29] = 0.9, 0.5, 0.6
    assert connectivity.dense_layers(densities) == {0, 28, 29} | {20}
    assert 0 in connectivity.dense_layers([0.1])


def test_recall_is_that_of_the_worst_sample():
    at = layout(GRID)
    rows = sample_rows(at)
    mass = torch.zeros(2, 1, 64, at.blocks)
    mass[0, ..., 0] = 1.0
    mass[1, ..., 0], mass[1, ..., 1] = 0.5, 0.5
    mask = torch.zeros(1, at.blocks, at.blocks, dtype=torch.bool)
    mask[..., 0] = True
    assert recall(mass, mask, rows).tolist() == [0.5]


def test_sampled_recall_is_the_exact_one_on_average():
    """Also where the rows' distance is the block size: they must not all lie alike in theirs."""
    at = layout((8, 16, 16), block=32)
    q, k = local_attention(at)
    mask = Static(at, HEADS, 0.1).layer(0, 0)
    exact = (exact_map(q, k, at) * mask).sum(-1).mean(-1)
    turns = [sample_rows(at, turn) for turn in range(8)]
    found = [recall(row_mass(q[None], k[None], at, rows, SCALE), mask, rows) for rows in turns]
    assert bool((exact < 0.97).all())  # so that it can be told from sampling the middle alone
    torch.testing.assert_close(torch.stack(found).mean(0), exact, atol=0.01, rtol=0)


def test_the_first_mask_that_holds_enough_is_taken():
    at = layout(GRID)
    rows = sample_rows(at)
    mass = torch.zeros(1, 4, 64, at.blocks)
    mass[..., 0], mass[..., 1] = 0.9, 0.1
    mass[:, 3] = math.nan
    fused = torch.zeros(4, at.blocks, at.blocks, dtype=torch.bool)
    fused[:, :, 0] = True
    fused[0, :, 1] = True
    template = torch.zeros_like(fused)
    template[1, :, 1] = True
    found = judge(mass, fused, fused | template, rows)
    assert found.source.tolist() == [0, 1, 2, 2]
    assert found.recall[:3].tolist() == [1.0, 1.0, 1.0]
    later = judge(mass, fused, fused | template, rows, start=torch.tensor([1, 2, 0, 0]))
    assert later.source.tolist() == [1, 2, 2, 2]
