"""The attention override as the host calls it, with a stand-in for the host's function."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from carnator.attention import KeyLists, expand, hostcall
from carnator.attention import override as module
from carnator.attention.override import Connections, SparseAttention, override

HEADS, TOKENS, BLOCK = 2, 100, 16
BLOCKS = -(-TOKENS // BLOCK)


def host(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False,
    **kwargs,
):  # fmt: skip
    """What ComfyUI's attention functions do, in the same shapes."""
    if not skip_reshape:
        width = q.shape[-1] // heads
        q, k, v = (
            t.unflatten(-1, (heads if t is q else -1, width)).transpose(1, 2) for t in (q, k, v)
        )
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        scale=kwargs.get("scale"),
        enable_gqa=kwargs.get("enable_gqa", False),
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def some_mask(seed: int = 0, heads: int = HEADS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(heads, BLOCKS, BLOCKS, generator=generator) < 0.4
    return mask | torch.eye(BLOCKS, dtype=torch.bool)


def qkv(width: int = 24, batch: int = 2, keys: int = TOKENS, key_heads: int = HEADS):
    generator = torch.Generator().manual_seed(width)
    shapes = [(TOKENS, HEADS), (keys, key_heads), (keys, key_heads)]
    return [torch.randn(batch, n, h * width, generator=generator) for n, h in shapes]


def apart(t: Tensor, heads: int = HEADS) -> Tensor:
    return t.unflatten(-1, (heads, -1)).transpose(1, 2)


def masked(mask: Tensor, *args, **kwargs) -> Tensor:
    return host(*args, mask=expand(mask, BLOCK, TOKENS, TOKENS)[None], **kwargs)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-6, rtol=0)


MASK = some_mask()
LISTS = Connections(KeyLists(MASK, BLOCK))


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("positional", [False, True])
def test_shapes_are_those_of_the_host(outer, skip, positional):
    q, k, v = (apart(t) for t in qkv()) if skip else qkv()
    words = {"skip_reshape": skip, "skip_output_reshape": outer, "transformer_options": {"a": 1}}
    args = (q, k, v, HEADS)
    if positional:
        args, words = (*args, None, None, skip, outer), {"transformer_options": {"a": 1}}
    calls = []
    out = override(host, *args, plan=lambda c: calls.append(c) or LISTS, backend="gather", **words)
    expected = masked(MASK, q, k, v, HEADS, skip_reshape=skip, skip_output_reshape=outer)
    close(out, expected)
    assert calls[0].options == {"a": 1} and calls[0].to_itself
    assert calls[0].q.shape == (2, HEADS, TOKENS, 24)


def test_the_call_goes_through_word_for_word_when_there_is_nothing_to_do():
    seen = []

    def func(*args, **kwargs):
        seen.append((args, kwargs))
        return "its answer"

    q, k, v = qkv()
    args, words = (q, k, v, HEADS, None), {"skip_reshape": False, "something_new": 7}
    watch = SparseAttention(lambda call: None)
    assert watch(func, *args, **words) == "its answer"
    assert all(a is b for a, b in zip(seen[0][0], args)) and seen[0][1] == words
    assert watch.used == {"host": 1}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool)}, id="a mask"),
        pytest.param({"something_new": 7}, id="a word unknown here"),
        pytest.param({"heads": 5}, id="heads that do not divide"),
        pytest.param({"q": torch.zeros(2, TOKENS, 48, requires_grad=True)}, id="training"),
        pytest.param({"q": torch.zeros(2, TOKENS, 48, dtype=torch.float64)}, id="mixed types"),
        pytest.param({"k": torch.zeros(1, TOKENS, 48)}, id="another batch"),
        pytest.param({"k": torch.zeros(2, TOKENS, 24)}, id="fewer heads, not grouped"),
        pytest.param({"q": torch.zeros(2, 0, 48)}, id="no tokens"),
    ],
)
def test_calls_it_cannot_stand_in_for_are_not_even_shown_to_the_plan(change):
    q, k, v = qkv()
    words = {"q": q, "k": k, "v": v, "heads": HEADS, **change}

    def plan(call):
        raise AssertionError("shown")

    assert override(lambda *a, **w: "host", plan=plan, backend="gather", **words) == "host"


def test_cross_attention_is_shown_and_told_apart():
    q, k, v = qkv(keys=30)
    calls = []
    out = override(host, q, k, v, HEADS, plan=lambda c: calls.append(c))
    assert not calls[0].to_itself
    assert torch.equal(out, host(q, k, v, HEADS))


@pytest.mark.parametrize("skip", [False, True])
def test_grouped_heads(skip):
    q, k, v = qkv(key_heads=1)
    if skip:
        q, k, v = apart(q), apart(k, 1), apart(v, 1)
    words = {"enable_gqa": True, "skip_reshape": skip, "scale": 0.2}
    out = override(host, q, k, v, HEADS, plan=lambda c: LISTS, backend="gather", **words)
    close(out, masked(MASK, q, k, v, HEADS, **words))


def test_an_order_of_tokens_is_undone():
    q, k, v = qkv(width=10)
    order = torch.randperm(TOKENS)
    place = order.argsort()
    row = Connections(KeyLists(MASK, BLOCK), order)
    out = override(host, q, k, v, HEADS, plan=lambda c: row, backend="gather")
    tokens = expand(MASK, BLOCK, TOKENS, TOKENS)[:, place][:, :, place]
    close(out, host(q, k, v, HEADS, mask=tokens[None]))


def test_rows_of_a_batch_may_differ():
    q, k, v = qkv(batch=4)
    other = some_mask(1)
    rows = [LISTS, LISTS, None, Connections(KeyLists(other, BLOCK))]
    watch = SparseAttention(lambda call: rows, backend="gather")
    out = watch(host, q, k, v, HEADS)
    close(out[:2], masked(MASK, q[:2], k[:2], v[:2], HEADS))
    close(out[2:3], host(q[2:3], k[2:3], v[2:3], HEADS))
    close(out[3:], masked(other, q[3:], k[3:], v[3:], HEADS))
    assert watch.used == {"gather": 2, "host": 1}


def test_auto_leaves_to_the_host_what_does_not_pay():
    q, k, v = qkv()
    watch = SparseAttention(lambda call: LISTS)
    assert torch.equal(watch(host, q, k, v, HEADS), host(q, k, v, HEADS))
    assert watch.used == {"host": 1}


def test_an_earlier_override_is_called_in_the_functions_place():
    def previous(func, *args, **kwargs):
        return func(*args, **kwargs) + 1

    q, k, v = qkv()
    watch = SparseAttention(lambda call: None, previous)
    assert torch.equal(watch(host, q, k, v, HEADS), host(q, k, v, HEADS) + 1)
    assert not hasattr(watch, "container_function")


@pytest.mark.parametrize("where", ["plan", "lists", "rows"])
def test_after_an_error_everything_is_dense_and_the_log_says_so_once(where, caplog):
    def plan(call):
        if where == "plan":
            raise MemoryError("no more")
        if where == "rows":
            return [None] * 5
        return Connections(KeyLists(MASK[:, :, :3], BLOCK))

    q, k, v = qkv()
    watch = SparseAttention(plan, backend="gather")
    for _ in range(3):
        assert torch.equal(watch(host, q, k, v, HEADS), host(q, k, v, HEADS))
    assert watch.failed and len(caplog.records) == 1


class Container:
    """As the host's: gives its tensor up once."""

    def __init__(self, tensor):
        self.tensor = tensor

    def peek(self):
        if self.tensor is None:
            raise RuntimeError("consumed")
        return self.tensor

    def take(self):
        tensor, self.tensor = self.peek(), None
        return tensor


@pytest.mark.parametrize("answer", ["sparse", "nothing", "error"])
def test_containers_are_emptied_by_whoever_computes(answer):
    def plan(call):
        if answer == "error":
            raise RuntimeError("broken")
        return LISTS if answer == "sparse" else None

    def previous(func, *args, **kwargs):
        raise AssertionError("has a path of its own for containers")

    taken = []

    def container_function(*args, **kwargs):
        taken.append(tuple(container.take() for container in args[:3]))
        return host(*taken[0], *args[3:], **kwargs)

    previous.container_function = container_function
    q, k, v = qkv()
    containers = [Container(t) for t in (q, k, v)]
    watch = SparseAttention(plan, previous, backend="gather")
    out = watch.container_function(*containers, HEADS)
    assert all(container.tensor is None for container in containers)
    assert bool(taken) == (answer != "sparse")
    close(out, masked(MASK, q, k, v, HEADS) if answer == "sparse" else host(q, k, v, HEADS))


def test_a_model_that_forbids_low_precision_gets_no_quantised_kernel(monkeypatch):
    q, k, v = qkv()
    watch = SparseAttention(lambda call: LISTS, backend="fused")
    out = watch(host, q, k, v, HEADS, low_precision_attention=False)
    assert torch.equal(out, host(q, k, v, HEADS)) and not watch.failed


def test_where_costs_are_guesses_the_first_call_is_timed_against_the_hosts_own(monkeypatch):
    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("meta")

    ticks = iter([0.0, 1.0, 1.0, 3.0])
    monkeypatch.setattr(module, "TRIALS", module.Trials(clock=lambda device: next(ticks)))
    monkeypatch.setattr(module, "ranked", lambda *a: ["gather"])
    made = []

    def sparse(q, k, v, lists, **kwargs):
        made.append(1)
        return torch.zeros(q.shape)

    monkeypatch.setattr(module, "sparse_attention", sparse)
    q, k, v = (t.as_subclass(Elsewhere) for t in qkv())
    watch = SparseAttention(lambda call: LISTS)
    for _ in range(3):
        out = watch(host, q, k, v, HEADS)
        assert bool((out != 0).any())  # the host's took 1 second, ours 2
    assert len(made) == 2  # to warm up and to time


def test_words_of_the_host_are_known_by_their_own_names():
    names = [p.name for p in inspect.signature(host).parameters.values()]
    assert tuple(names[: len(hostcall.POSITIONAL)]) == hostcall.POSITIONAL
