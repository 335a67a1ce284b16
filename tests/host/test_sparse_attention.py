"""The attention override inside the host's own models and sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import part
from sampling import SHAPE, sample

STEPS = 4


def with_override(model: Any, override: Any) -> Any:
    clone = model.clone()
    inner = clone.model_options.setdefault("transformer_options", {})
    clone.model_options["transformer_options"] = {**inner, "optimized_attention_override": override}
    return clone


def run(model: Any) -> torch.Tensor:
    return sample(model, steps=STEPS, shape=SHAPE)


@pytest.fixture(scope="module")
def layout() -> Any:
    return part("carnator.connectivity").layout((4, 8, 8))


def plan_for(layout: Any, density: float, seen: list) -> Any:
    attention, override = part("carnator.attention"), part("carnator.attention.override")
    mask = part("carnator.connectivity").nearest(layout, density).expand(4, -1, -1)
    held = override.Connections(attention.KeyLists(mask, layout.block), layout.order)

    def plan(call: Any) -> Any:
        seen.append((call.to_itself, tuple(call.q.shape[1:]), call.k.shape[2]))
        return held if call.to_itself and call.q.shape[2] == layout.tokens else None

    return plan


def test_with_nothing_to_do_the_run_is_the_hosts_to_the_last_bit(demo_model: Any) -> None:
    watch = part("carnator.attention.override").SparseAttention(lambda call: None)
    assert torch.equal(run(with_override(demo_model, watch)), run(demo_model))
    assert watch.used["host"] > 0 and not watch.failed


def test_a_mask_that_keeps_all_changes_rounding_only(demo_model: Any, layout: Any) -> None:
    seen: list = []
    module = part("carnator.attention.override")
    watch = module.SparseAttention(plan_for(layout, 1.0, seen), backend="gather")
    plain, out = run(demo_model), run(with_override(demo_model, watch))
    assert float((out - plain).norm() / plain.norm()) < 1e-4
    # Self-attention over the video and cross-attention to the text, in every block.
    assert watch.used["gather"] == watch.used["host"] > 0 and not watch.failed
    assert {s[0] for s in seen} == {True, False} and {s[1] for s in seen} == {(4, 256, 32)}


def test_a_sparse_run_comes_near_and_auto_leaves_so_small_a_model_dense(
    demo_model: Any, layout: Any
) -> None:
    module = part("carnator.attention.override")
    watch = module.SparseAttention(plan_for(layout, 0.6, []), backend="gather")
    plain, out = run(demo_model), run(with_override(demo_model, watch))
    away = float((out - plain).norm() / plain.norm())
    assert 1e-3 < away < 0.5 and watch.used["gather"] > 0
    auto = module.SparseAttention(plan_for(layout, 0.6, []))
    assert torch.equal(run(with_override(demo_model, auto)), plain)
    assert set(auto.used) == {"host"}


def test_the_hosts_words_are_all_understood() -> None:
    """A word of the host's attention that is unknown here would quietly keep it dense."""
    import inspect

    from comfy.ldm.modules import attention

    hostcall = part("carnator.attention.hostcall")
    names = [
        p.name
        for p in inspect.signature(attention.attention_pytorch).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert tuple(names) == hostcall.POSITIONAL
