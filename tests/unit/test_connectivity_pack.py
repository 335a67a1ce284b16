"""Packed masks come back as they were, and nothing that was tampered with is believed."""

from __future__ import annotations

import math
import struct
import zlib

import pytest
import torch
from attention_maps import GRID, HEADS, some_layer
from hypothesis import given, settings
from hypothesis import strategies as st

from carnator.connectivity import Geometry, Layer, MaskError, Packed, Static, layout, pack
from carnator.connectivity.pack import HEAD


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.data())
def test_packed_masks_come_back(anchors, layers, tokens, data):
    at = layout((1, 1, tokens), block=4)
    template = Static(at, HEADS)
    seeds = st.one_of(st.none(), st.integers(0, 10**6))
    masks = []
    for _ in range(anchors):
        drawn = [data.draw(seeds) for _ in range(layers)]
        masks.append([None if seed is None else some_layer(at, seed) for seed in drawn])
    sigmas = [1.0 - i / 4 for i in range(anchors)]
    geometry = Geometry.of(at, layers, HEADS)
    found = Packed(pack(masks, sigmas, geometry, template), geometry, template)
    assert found.sigmas == sigmas
    for anchor in range(anchors):
        for number in range(layers):
            given_, back = masks[anchor][number], found.layer(anchor, number)
            if given_ is None or not bool(given_.sparse.any()):
                assert back is None
                continue
            assert torch.equal(back.sparse, given_.sparse)
            assert torch.equal(back.mask[back.sparse], given_.mask[given_.sparse])


def packed_pair(layers: int = 2):
    at = layout(GRID)
    template = Static(at, HEADS)
    geometry = Geometry.of(at, layers, HEADS)
    masks = [[some_layer(at, 10 * a + i) for i in range(layers)] for a in range(2)]
    for row in masks:
        for layer in row:
            layer.sparse[:] = True
    return pack(masks, [0.9, 0.5], geometry, template), geometry, template, at


def read_all(data: bytes, geometry: Geometry, template) -> list:
    packed = Packed(data, geometry, template)
    return [packed.layer(a, i) for a in range(len(packed.sigmas)) for i in range(geometry.layers)]


def test_masks_like_the_template_or_the_anchor_before_take_little_room():
    at = layout((8, 16, 16), block=16)
    template, geometry = Static(at, HEADS), Geometry.of(at, 1, HEADS)
    all_sparse = torch.ones(HEADS, dtype=torch.bool)
    noise = Layer(some_layer(at, 1).mask, all_sparse)
    size = {
        name: len(pack(masks, [0.9, 0.5][: len(masks)], geometry, template))
        for name, masks in {
            "noise": [[noise]],
            "template": [[Layer(template.layer(0, 0), all_sparse)]],
            "again": [[noise], [noise]],
        }.items()
    }
    assert size["template"] < 0.05 * size["noise"]
    assert size["again"] < 1.1 * size["noise"]


def test_masks_of_something_else_are_refused():
    data, geometry, template, at = packed_pair()
    assert len(read_all(data, geometry, template)) == 4
    other = layout((4, 8, 9))
    for wrong in (
        Geometry.of(at, 3, HEADS),
        Geometry.of(at, 2, 3),
        Geometry.of(other, 2, HEADS),
        Geometry.of(layout(GRID, block=16), 2, HEADS),
        Geometry.of(layout(GRID, 1), 2, HEADS),
    ):
        with pytest.raises(MaskError, match="not of"):
            Packed(data, wrong, template)
    with pytest.raises(MaskError, match="another template"):
        Packed(data, geometry, Static(at, HEADS, 0.5))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_masks_are_refused_or_read_in_bounds(data):
    blob, geometry, template, at = packed_pair()
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "noise"]))
    if kind == "flip":
        i = data.draw(st.integers(0, len(blob) - 1))
        blob = blob[:i] + bytes([blob[i] ^ data.draw(st.integers(1, 255))]) + blob[i + 1 :]
    elif kind == "cut":
        blob = blob[: data.draw(st.integers(0, len(blob) - 1))]
    elif kind == "grow":
        blob += data.draw(st.binary(min_size=1, max_size=20))
    else:
        blob = data.draw(st.binary(max_size=200))
    try:
        layers = read_all(blob, geometry, template)
    except MaskError:
        return
    assert kind == "flip"  # in a sigma or a checksum's blind spot
    for layer in layers:
        assert layer is None or layer.mask.shape == (HEADS, at.blocks, at.blocks)


def with_part(part: bytes) -> tuple[bytes, Geometry, Static]:
    """A well-formed frame of one anchor and one layer around any part."""
    at = layout(GRID)
    template, geometry = Static(at, HEADS), Geometry.of(at, 1, HEADS)
    head = HEAD.pack(
        b"CBM1", 1, 1, HEADS, at.block, at.blocks, *GRID, 0, 0, template.digest
    )  # fmt: skip
    return head + struct.pack("<fI", 0.9, len(part)) + part, geometry, template


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(bytes(2**22), id="inflates without end"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x00\xc0" + bytes(255), id="a row too short"),
        pytest.param(b"\x00\xc0" + bytes(257), id="a byte too many"),
        pytest.param(b"\x00\xe0" + bytes(256), id="more heads than there are"),
        pytest.param(b"\x00\x00", id="no head at all"),
        pytest.param(b"\x01\xc0" + bytes(256), id="based on an anchor before the first"),
        pytest.param(b"\x02\xc0" + bytes(256), id="based on nothing known"),
    ],
)
def test_parts_that_lie_about_their_size_are_refused(raw):
    data, geometry, template = with_part(zlib.compress(raw))
    with pytest.raises(MaskError):
        read_all(data, geometry, template)
    sound, geometry, template = with_part(zlib.compress(b"\x00\xc0" + bytes(256)))
    assert torch.equal(read_all(sound, geometry, template)[0].mask, template.layer(0, 0))


@pytest.mark.parametrize("sigmas", [(0.5, 0.9), (math.nan, 0.5), (0.9, 0.9), (0.9, -0.5)])
def test_noise_levels_must_fall(sigmas):
    data, geometry, template, _ = packed_pair()
    data = data[: HEAD.size] + struct.pack("<2f", *sigmas) + data[HEAD.size + 8 :]
    with pytest.raises(MaskError, match="do not fall"):
        Packed(data, geometry, template)


def test_masks_that_do_not_fit_are_not_packed():
    at = layout(GRID)
    template, geometry = Static(at, HEADS), Geometry.of(at, 1, HEADS)
    layer = some_layer(at, 0)
    layer.sparse[:] = True
    for masks, sigmas in (
        ([[layer]], [0.9, 0.5]),
        ([], []),
        ([[layer, layer]], [0.9]),
        ([[Layer(layer.mask[:, :3], layer.sparse)]], [0.9]),
    ):
        with pytest.raises(ValueError, match=r"masks for|expected"):
            pack(masks, sigmas, geometry, template)
