"""Block-sparse attention: every back end against dense attention with the mask spelt out."""

from __future__ import annotations

import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from carnator import attention
from carnator.attention import (
    KeyLists,
    Unavailable,
    block_count,
    choose,
    flex,
    fused,
    gather,
    gather_cpu,
    parts,
    sparse_attention,
    workers,
)

# heads, key heads, queries, keys, head dim, value dim, block, dtype
SHAPES = [
    pytest.param(3, 3, 256, 256, 16, 16, 32, torch.float32, id="whole blocks"),
    pytest.param(2, 2, 300, 300, 128, 128, 128, torch.float32, id="no multiple of the block"),
    pytest.param(4, 2, 257, 257, 24, 8, 16, torch.float32, id="grouped, odd head dims"),
    pytest.param(4, 1, 64, 200, 20, 20, 64, torch.float32, id="other keys than queries"),
    pytest.param(2, 2, 70, 70, 32, 32, 128, torch.float32, id="fewer tokens than a block"),
    pytest.param(2, 1, 100, 100, 16, 16, 16, torch.float64, id="float64"),
    pytest.param(2, 2, 130, 130, 32, 32, 32, torch.bfloat16, id="bfloat16"),
    pytest.param(2, 2, 130, 130, 32, 32, 32, torch.float16, id="float16"),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
has_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "cl"))), reason="flex_attention needs a compiler"
)


def tensors(heads, key_heads, queries, keys, dim, value_dim, dtype, batch=2):
    generator = torch.Generator().manual_seed(queries + dim)

    def made(*shape: int) -> Tensor:
        # As models make them: heads beside each other in memory, so that views have strides.
        return torch.randn(batch, shape[1], shape[0], shape[2], generator=generator).to(dtype)

    q, k = made(heads, queries, dim), made(key_heads, keys, dim)
    return q.transpose(1, 2), k.transpose(1, 2), made(key_heads, keys, value_dim).transpose(1, 2)


def some_mask(heads: int, q_blocks: int, k_blocks: int, density: float = 0.4) -> Tensor:
    generator = torch.Generator().manual_seed(heads + q_blocks)
    mask = torch.rand(heads, q_blocks, k_blocks, generator=generator) < density
    mask[:, :, 0] |= ~mask.any(-1)
    mask[0] = True  # a head that sees everything
    return mask


def dense(q, k, v, mask, block, scale, order=None) -> Tensor:
    """The definition, in float64."""
    tokens = attention.expand(mask, block, q.shape[2], k.shape[2])
    if order is not None:
        place = order.argsort()
        tokens = tokens[:, place][:, :, place]
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q.double(), k, v, attn_mask=tokens, scale=scale)


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype and out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("run", [gather_cpu.gather_on_cpu, gather.gather_on_device])
@pytest.mark.parametrize(
    ("heads", "key_heads", "queries", "keys", "dim", "value_dim", "block", "dtype"), SHAPES
)
def test_gathering_equals_dense_attention_with_the_mask(
    monkeypatch, threads, run, heads, key_heads, queries, keys, dim, value_dim, block, dtype
):
    monkeypatch.setattr(gather_cpu, "worker_count", lambda: threads)
    q, k, v = tensors(heads, key_heads, queries, keys, dim, value_dim, dtype)
    mask = some_mask(heads, block_count(queries, block), block_count(keys, block))
    lists = KeyLists(mask, block)
    orders = [None] if queries != keys else [None, torch.randperm(queries)]
    for order in orders:
        expected = dense(q, k, v, mask, block, 0.3, order)
        assert_close(run(q, k, v, lists, 0.3, order), expected, dtype)


@pytest.mark.parametrize("scratch", [0, 1e-9, 1])
def test_lists_longer_than_the_scratch_are_taken_in_runs(monkeypatch, scratch):
    q, k, v = tensors(2, 2, 600, 600, 16, 16, torch.float32)
    q = q * 8  # peaked rows, whose maxima differ between runs
    mask = some_mask(2, 38, 38, 0.7)
    mask[0, :, 5] = False
    expected = dense(q, k, v, mask, 16, 0.5)
    monkeypatch.setattr(gather_cpu, "SCRATCH", scratch)
    monkeypatch.setattr(gather_cpu, "LEAST_SCRATCH", 0)
    runs = []
    attend = gather_cpu._attend
    monkeypatch.setattr(gather_cpu, "_attend", lambda *a: runs.append(a[-1].run) or attend(*a))
    out = sparse_attention(q, k, v, mask, block=16, backend="gather", scale=0.5)
    assert_close(out, expected, torch.float32)
    assert (max(runs) > gather_cpu.LEAST_RUN) == (scratch == 1)


def test_without_softmax_in_place_the_result_is_the_same(monkeypatch):
    q, k, v = tensors(2, 2, 256, 256, 16, 16, torch.float32)
    mask = some_mask(2, 8, 8)
    monkeypatch.setattr(gather_cpu, "_softmax_in_place", lambda: False)
    out = sparse_attention(q, k, v, mask, block=32, backend="gather")
    assert_close(out, dense(q, k, v, mask, 32, 0.25), torch.float32)


def test_scores_far_apart_give_no_nan():
    q, k, v = tensors(2, 2, 256, 256, 16, 16, torch.float32)
    mask = some_mask(2, 8, 8)
    out = sparse_attention(q * 1e3, k, v, mask, block=32, backend="gather")
    # Scores of thousands are rounded to a few ten-thousandths.
    expected = dense(q * 1e3, k, v, mask, 32, 0.25).float()
    torch.testing.assert_close(out, expected, atol=5e-3, rtol=0)


def test_inputs_are_left_alone_and_inference_tensors_served(monkeypatch):
    monkeypatch.setattr(gather_cpu, "worker_count", lambda: 2)
    mask = some_mask(2, 8, 8)
    with torch.inference_mode():
        q, k, v = tensors(2, 2, 256, 256, 16, 16, torch.float32)
        before = [t.clone() for t in (q, k, v)]
        sparse_attention(q, k, v, mask, block=32, backend="gather")
        assert all(map(torch.equal, before, (q, k, v)))


def test_the_result_lies_as_hosts_reshape_it():
    q, k, v = tensors(3, 3, 256, 256, 16, 16, torch.float32)
    out = sparse_attention(q, k, v, some_mask(3, 8, 8), block=32, backend="gather")
    assert out.transpose(1, 2).is_contiguous()


def test_workers_compute_alone_and_leave_the_callers_threads(monkeypatch):
    monkeypatch.setattr(workers, "_pools", {})
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen: list[int] = []
        workers.spread(lambda slot: seen.append(torch.get_num_threads()), 3)
        assert seen == [1, 1, 1] and torch.get_num_threads() == 2
        fresh: list[int] = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert fresh == [2]
    finally:
        torch.set_num_threads(threads)


def test_a_workers_error_is_raised():
    def work(slot: int) -> None:
        if slot == 1:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        workers.spread(work, 2)


@has_compiler
def test_flex_attention_equals_dense_attention_with_the_mask():
    q, k, v = tensors(4, 2, 300, 300, 16, 16, torch.float32)
    mask = some_mask(4, 10, 10)
    order = torch.randperm(300)
    out = sparse_attention(q, k, v, mask, block=32, backend="flex", scale=0.3, order=order)
    assert_close(out, dense(q, k, v, mask, 32, 0.3, order), torch.float32)
    # Another mask of the same shapes takes the compiled function, not the compiled mask.
    other = mask.flip(2)
    compiled = len(flex._functions)
    out = sparse_attention(q, k, v, other, block=32, backend="flex", scale=0.3, order=order)
    assert_close(out, dense(q, k, v, other, 32, 0.3, order), torch.float32)
    assert len(flex._functions) == compiled


def test_a_flex_result_that_ignores_the_mask_is_not_trusted(monkeypatch):
    """As torch does when it falls back to running uncompiled."""
    q, k, v = tensors(2, 2, 250, 250, 16, 16, torch.float32)
    mask = some_mask(2, 8, 8)
    monkeypatch.setattr(
        flex,
        "_function",
        lambda shape: lambda _, q, k, v, mask, scale: F.scaled_dot_product_attention(q, k, v),
    )
    for _ in range(2):
        with pytest.raises(Unavailable, match="off by"):
            sparse_attention(q, k, v, mask, block=32, backend="flex")


class Kernel:
    """Stands in for SpargeAttn's function: what it was given, and an answer right or wrong."""

    def __init__(self, wrong: bool = False):
        self.wrong, self.masks = wrong, []

    def __call__(self, q, k, v, mask_id, scale, pvthreshd, tensor_layout):
        assert tensor_layout == "HND" and q.is_contiguous() and pvthreshd >= 1e6
        self.masks.append(mask_id)
        tall, wide = (-(-q.shape[2] // n) for n in mask_id.shape[2:])
        tall, wide = (128, 64) if tall > 64 else (64, 128)
        mask = mask_id.bool().repeat_interleave(tall, 2).repeat_interleave(wide, 3)
        mask = mask[:, :, : q.shape[2], : k.shape[2]]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=None if self.wrong else mask, scale=scale
        )


@pytest.fixture
def installed(monkeypatch):
    """A stand-in for the fused kernel, on the CPU; returns a way to choose it."""

    def put(kernel: Kernel, capability=(8, 9)) -> Kernel:
        monkeypatch.setattr(fused, "entry", lambda: kernel)
        monkeypatch.setattr(fused, "available", lambda *a: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(fused, "_trusted", set())
        monkeypatch.setattr(fused, "_refused", {})
        return kernel

    return put


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_the_fused_kernel_is_given_the_mask_in_its_own_blocks(installed, capability):
    kernel = installed(Kernel(), capability)
    q, k, v = tensors(2, 2, 600, 600, 64, 64, torch.float32)
    mask = some_mask(2, 5, 5)
    order = torch.randperm(600)
    out = sparse_attention(q, k, v, mask, block=128, backend="fused", order=order)
    assert_close(out, dense(q, k, v, mask, 128, 0.125, order), torch.float32)
    shape = (5, 10) if capability == (8, 9) else (10, 5)
    assert kernel.masks[0].shape[2:] == shape and kernel.masks[0].dtype == torch.int8


def test_a_fused_kernel_that_is_off_is_dropped_with_one_line(installed, monkeypatch, caplog):
    kernel = installed(Kernel(wrong=True))
    monkeypatch.setattr(attention, "ranked", lambda *a: ["fused", "gather"])
    monkeypatch.setattr(attention, "_told", set())
    q, k, v = tensors(2, 2, 600, 600, 64, 64, torch.float32)
    mask = some_mask(2, 5, 5, 0.3)
    caplog.set_level("INFO", "carnator")
    for _ in range(2):
        out = sparse_attention(q, k, v, mask, block=128)
        assert_close(out, dense(q, k, v, mask, 128, 0.125), torch.float32)
    assert len(kernel.masks) == 1
    assert len([r for r in caplog.records if "fused attention is not used" in r.message]) == 1


def test_without_the_package_nothing_fails(monkeypatch):
    monkeypatch.setattr(fused, "PACKAGE", "no_such_kernels")
    fused.entry.cache_clear()
    try:
        assert fused.entry() is None
        q, k, v = tensors(1, 1, 128, 128, 64, 64, torch.float32)
        with pytest.raises(Unavailable, match="not installed"):
            sparse_attention(
                q, k, v, torch.ones(1, 1, 1, dtype=torch.bool), block=128, backend="fused"
            )
    finally:
        fused.entry.cache_clear()


def test_tokens_are_reordered_some_heads_at_a_time():
    q, k, v = tensors(24, 12, 64, 64, 8, 8, torch.float32, batch=1)
    order = torch.randperm(64)
    seen = []

    def run(q, k, v, heads):
        seen.append((q.shape[1], k.shape[1], heads))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    out = parts.in_parts(run, q, k, v, order)
    assert [s[:2] for s in seen] == [(2, 1)] * 12
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


# --- masks and arguments -----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40), st.integers(0, 10**6))
def test_packed_bits_come_back(heads, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(heads, rows, columns, generator=generator) < 0.5
    packed = attention.pack_bits(mask)
    assert packed.dtype == torch.uint8 and packed.shape[-1] == -(-columns // 8)
    assert torch.equal(attention.unpack_bits(packed, columns), mask)


def test_a_packed_mask_serves_as_well():
    q, k, v = tensors(2, 2, 300, 300, 16, 16, torch.float32)
    mask = some_mask(2, 10, 10)
    out = sparse_attention(q, k, v, attention.pack_bits(mask), block=32, backend="gather")
    assert_close(out, dense(q, k, v, mask, 32, 0.25), torch.float32)


def test_calls_that_do_not_fit_are_refused_with_a_sentence():
    q, k, v = tensors(2, 2, 100, 100, 8, 8, torch.float32)
    mask = some_mask(2, 4, 4)
    empty = mask.clone()
    empty[1, 2] = False
    lists = KeyLists(mask, 32)
    for what, arguments, options in [
        ("without any key", (q, k, v, empty), {"block": 32}),
        ("must be", (q, k, v, mask[:, :3]), {"block": 32}),
        ("must be", (q, k, v, mask[:1]), {"block": 32}),
        ("block size is None", (q, k, v, mask), {}),
        ("expected", (q, k, v, mask.float()), {"block": 32}),
        ("bytes a row", (q, k, v, torch.ones(2, 4, 2, dtype=torch.uint8)), {"block": 32}),
        ("1 or more", (q, k, v, mask), {"block": 0}),
        ("1 or more", (q, k, v, mask), {"block": -1}),
        ("no back end", (q, k, v, lists), {"backend": "magic"}),
        ("of blocks of 32", (q, k, v, lists), {"block": 16}),
        ("got q", (q, k[:, :, :50], v, lists), {}),
        ("got q", (q[:1], k, v, lists), {}),
        ("names 99 tokens", (q, k, v, lists), {"order": torch.arange(99)}),
    ]:
        with pytest.raises(ValueError, match=what):
            sparse_attention(*arguments, **options)


# --- the choice --------------------------------------------------------------------------------


def fake(tokens: int, dim: int = 128, device: str = "cpu"):
    shape = torch.Size((1, 12, tokens, dim))
    return SimpleNamespace(shape=shape, device=torch.device(device), dtype=torch.float32)


def chosen(tokens: int, density: float, dim: int = 128) -> list[str]:
    q = fake(tokens, dim)
    return choose.ranked(q, q, q, SimpleNamespace(density=density, block=128))


def test_dense_attention_is_chosen_where_sparse_would_not_pay():
    assert chosen(8192, 0.15) == ["gather"] == chosen(8192, 0.3)
    assert chosen(8192, 1.0) == [] == chosen(8192, 0.9)
    assert chosen(200, 0.1) == []
    # Never again once it pays: more tokens and fewer blocks only help.
    for dim in (32, 64, 128):
        for tokens in (1024, 4096, 32768):
            pays = [bool(chosen(tokens, d / 20, dim)) for d in range(1, 21)]
            assert pays == sorted(pays, reverse=True)
            more = [bool(chosen(2 * tokens, d / 20, dim)) for d in range(1, 21)]
            assert all(b >= a for a, b in zip(pays, more))


def test_auto_on_a_dense_mask_is_dense_attention_to_the_last_bit():
    q, k, v = tensors(2, 2, 300, 300, 16, 16, torch.float32)
    mask = torch.ones(2, 10, 10, dtype=torch.bool)
    out = sparse_attention(q, k, v, mask, block=32)
    assert torch.equal(out, attention.dense_attention(q, k, v, 0.25))


@pytest.mark.parametrize(("seconds", "faster"), [((3.0, 2.0), True), ((2.0, 3.0), False)])
def test_a_trial_keeps_the_faster_one(seconds, faster):
    ticks = iter([0.0, seconds[0], 10.0, 10.0 + seconds[1]])
    trials = choose.Trials(clock=lambda device: next(ticks))
    q = torch.zeros(1, 1, 4, 2)
    key = trials.key(q, KeyLists(torch.ones(1, 2, 2, dtype=torch.bool), 2), "flex")
    assert trials.verdict(key) is None
    out = trials.run(key, q.device, lambda: torch.zeros(1), lambda: torch.ones(1))
    assert trials.verdict(key) is faster and float(out) == float(faster)
