"""Derivatives as bytes: how near they come back, and that untrusted bytes do no harm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carnator.coding import (
    BLOCK,
    TOLERANCE,
    Decoder,
    Encoder,
    decode,
    encode_alone,
    encode_change,
    encode_whole,
    fits,
    is_change,
)
from carnator.derivative import Branches, derivative
from carnator.recording import Recorder, load, needed_marks, trajectory
from carnator.store import Draft, Store

SHAPES = st.tuples(st.just(1), *[st.integers(1, 7)] * 3) | st.tuples(
    st.just(1), *[st.integers(1, 5)] * 4
)


def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@given(SHAPES, st.integers(0, 99), st.floats(1e-4, 1e4))
def test_whole_derivatives_keep_half_a_step_per_channel(shape, seed, scale):
    d = normal(shape, seed) * scale
    data = encode_whole(d)
    assert data.dtype == torch.int8 and len(data) == d.numel() + 4 * shape[1] and fits(data, shape)
    back = decode(data, shape)
    steps = d.abs().flatten(2).amax(2) / 127
    worst = (back - d).abs().flatten(2).amax(2)
    assert back.shape == d.shape and bool((worst <= 0.501 * steps + 1e-12).all())


@given(SHAPES, st.integers(0, 99), st.floats(1e-3, 1e3))
def test_changes_keep_half_a_step_per_block(shape, seed, scale):
    before, change = normal(shape, seed), normal(shape, seed + 100) * scale
    data = encode_change(before + change, before)
    blocks = -(-change.numel() // BLOCK)
    assert data.dtype == torch.uint8 and len(data) == blocks * (2 + BLOCK // 2)
    assert fits(data, shape) and is_change(data)
    flat = torch.zeros(blocks * BLOCK)
    flat[: change.numel()] = ((before + change) - before).flatten()
    steps = flat.view(blocks, BLOCK).abs().amax(1) / 7.5
    error = torch.zeros(blocks * BLOCK)
    error[: change.numel()] = (decode(data, shape, before) - before - change).flatten()
    worst = error.view(blocks, BLOCK).abs().amax(1)
    # Rounding of the scale to float16 and of sums to float32 comes on top.
    assert bool((worst <= 0.51 * steps + 1e-6 * (1 + scale)).all())


@given(st.integers(2, 12), st.integers(0, 99), st.floats(0, 3))
def test_a_path_never_strays_farther_than_one_coding_error(count, seed, roughness):
    """Each node is within the tolerance or int8's own error, however long and rough the path."""
    shape = (1, 3, 4, 5, 6)
    path = [normal(shape, seed)]
    for i in range(1, count):
        path.append(path[-1] + roughness * normal(shape, seed + i))
    encoder = Encoder(path[0])
    for d in path[1:]:
        encoder.add(d)
    decoder = Decoder(path[0], encoder.encoded)
    for i, d in enumerate(path):
        assert rms(decoder[i] - d) <= TOLERANCE * rms(d) * 1.001
    assert roughness < 1 or not any(is_change(data) for data in encoder.encoded[:1])


def test_smooth_paths_take_half_as_much() -> None:
    a, b = normal((1, 4, 5, 6, 7), 1), normal((1, 4, 5, 6, 7), 2)
    encoder = Encoder(a)
    for i in range(1, 20):
        encoder.add(a + 0.05 * i * b)
    assert all(is_change(data) for data in encoder.encoded)
    whole = len(encode_whole(a))
    assert sum(map(len, encoder.encoded)) < 0.6 * 19 * whole


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(0, 9))
def test_any_order_of_reading_gives_the_same(order, seed):
    shape = (1, 2, 3, 4)
    path = [normal(shape, seed)]
    for i in range(1, 10):
        path.append(path[-1] + (3.0 if i % 4 == 0 else 0.05) * normal(shape, seed + 20 * i))
    encoder = Encoder(path[0])
    for d in path[1:]:
        encoder.add(d)
    assert {is_change(data) for data in encoder.encoded} == {True, False}
    decoder = Decoder(path[0], encoder.encoded)
    for i in order:
        assert torch.equal(decoder[i], Decoder(path[0], encoder.encoded)[i])
        assert len(decoder._decoded) <= Decoder.KEPT


def test_what_is_coded_alone_comes_back_in_any_order_and_coarsely() -> None:
    path = [normal((1, 4, 5, 6, 7), seed) for seed in range(4)]
    decoder = Decoder(path[0], [encode_alone(d) for d in path[1:]], chained=False)
    for i in (3, 1, 0, 2):
        assert rms(decoder[i] - path[i]) <= (0.1 if i else 0) * rms(path[i])


def test_a_change_alone_says_nothing() -> None:
    d = normal((1, 2, 3, 4), 1)
    with pytest.raises(ValueError, match="without the derivative before"):
        decode(encode_change(d, d), d.shape)


@given(SHAPES, st.binary(max_size=300), st.booleans())
def test_foreign_bytes_decode_to_finite_numbers_or_do_not_fit(shape, content, signed):
    data = torch.from_numpy(np.frombuffer(content, np.int8 if signed else np.uint8).copy())
    if fits(data, shape):
        before = None if signed else torch.zeros(shape)
        assert bool(torch.isfinite(decode(data, shape, before)).all())
    assert not fits(data[None], shape) and not fits(data.float(), shape)


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_scales_that_are_no_numbers_do_not_fit(scale: float) -> None:
    shape = (1, 2, 4, 4)
    data = encode_whole(torch.ones(shape))
    data[:4] = torch.tensor([scale]).view(torch.int8)
    assert not fits(data, shape)
    change = encode_change(torch.ones(shape), torch.zeros(shape))
    change[:2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    assert not fits(change, shape)


# A recorded run.

SHAPE = (1, 4, 3, 5, 6)
SIGMAS = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]


def denoised(sigma: float, seed: int) -> torch.Tensor:
    return (
        normal(SHAPE, seed) + sigma * normal(SHAPE, seed + 1) + sigma**2 * normal(SHAPE, seed + 2)
    )


def recorded(
    cfg: float = 3.0, guided: bool = True, sigmas=SIGMAS
) -> tuple[Recorder, list[Branches]]:
    recorder, truth = Recorder(cfg), []
    for s in sigmas:
        x = normal(SHAPE, 7) * s
        cond = denoised(s, 10)
        uncond = cond + 0.1 * denoised(s, 20) if guided else None
        whole = cond if uncond is None else uncond + cfg * (cond - uncond)
        recorder.add(x, s, whole, cond, uncond)
        truth.append(
            Branches(derivative(x, cond, s), None if uncond is None else derivative(x, uncond, s))
        )
    return recorder, truth


@pytest.mark.parametrize("guided", [True, False])
def test_a_recorded_run_answers_at_its_own_and_other_guidance(guided: bool) -> None:
    recorder, truth = recorded(guided=guided)
    path = recorder.trajectory()
    for s, d in zip(SIGMAS, truth, strict=True):
        wanted = d.at(3.0)
        assert rms(path.at(s, 3.0) - wanted) <= 1.01 * TOLERANCE * rms(wanted)
        wanted = d.at(5.0)
        assert rms(path.at(s, 5.0) - wanted) <= 0.1 * rms(wanted)
    assert recorder.marks() == ([0, 1, 2, 4, 8, 9] if guided else [])
    assert recorder.trajectory().at(0.25, 3.0).shape == SHAPE


def draft(recorder: Recorder, **change: object) -> Draft:
    meta = {
        "sigmas": SIGMAS,
        "cfg": 3.0,
        "shape": list(SHAPE),
        "guidance": recorder.marks(),
        **change,
    }
    return Draft("aa", "01", meta, recorder.tensors(), np.ones(2, np.float16))


def test_what_is_loaded_in_part_is_what_was_recorded(tmp_path: Path, monkeypatch) -> None:
    recorder, _ = recorded()
    whole = recorder.trajectory()
    with Store(tmp_path) as store:
        store.put(draft(recorder))
        (entry,) = store.entries()
        read, asked = store.read, []
        monkeypatch.setattr(store, "read", lambda i, names: asked.append(names) or read(i, names))
        for targets, cfg, names in (
            ([1.0, 0.9], 3.0, {"first", "d.1"}),
            ([0.9, 0.85], 3.0, {"first", "d.1", "d.2"}),
            ([1.0], 5.0, {"first", "g.1"}),
            (
                [1.0, 0.55],
                None,
                {"first", *(f"d.{i}" for i in range(1, 6)), "g.1", "g.2", "g.4", "g.8"},
            ),
        ):
            path, _ = load(store, entry, targets, cfg=cfg)
            assert set(asked.pop()) == names
            for sigma in targets:
                for scale in (3.0, 5.0) if cfg is None else (cfg,):
                    assert torch.equal(path.at(sigma, scale), whole.at(sigma, scale))


@pytest.mark.parametrize(
    "lie",
    [
        {"guidance": None},
        {"guidance": [1, 2]},
        {"guidance": [0, 4, 4]},
        {"guidance": [0, 99]},
        {"guidance": [0, 1.5]},
        {"guidance": [0, True]},
        {"shape": [1, 4, 3, 5, 7]},
    ],
)
def test_records_whose_parts_do_not_fit_are_refused(tmp_path: Path, lie) -> None:
    recorder, _ = recorded()
    with Store(tmp_path) as store:
        store.put(draft(recorder, **lie))
        with pytest.raises(ValueError, match="sound|fit|shape"):
            load(store, store.entries()[0], SIGMAS)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("d.3", torch.zeros(5, dtype=torch.uint8)),
        ("d.3", torch.zeros(360)),
        ("g.4", torch.zeros(360, dtype=torch.int8)),
        ("first", torch.zeros(3, *SHAPE[1:]).half()),
        ("first", torch.zeros(SHAPE)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, bad: torch.Tensor) -> None:
    recorder, _ = recorded()
    tensors = {**recorder.tensors(), name: bad}
    with pytest.raises(ValueError, match="fit|form"):
        trajectory(tensors, SIGMAS, 3.0, recorder.marks())


def test_marks_needed_reach_one_beyond_the_part() -> None:
    class Entry:
        id, meta = "x", {"sigmas": SIGMAS, "guidance": [0, 4, 8, 9]}

    assert [needed_marks(Entry, n) for n in (1, 4, 5, 9, 10)] == [
        [0, 4],
        [0, 4],
        [0, 4, 8],
        [0, 4, 8, 9],
        [0, 4, 8, 9],
    ]


def test_nothing_recorded_is_no_donor() -> None:
    with pytest.raises(ValueError, match="Nothing was recorded"):
        Recorder().trajectory()
    assert Recorder().tensors() == {}
