"""torch.compile in the graph, before and after the node: the same hits, and no graph made twice."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from conftest import load
from harness import part
from sampling import CAPTION, TWEAK, flush, last_report, sample
from trial import attach, held, tried

HIT = ["miss", "hit", "exact"]


class Backend:
    """Compiles nothing and counts the graphs it is handed; ``calls`` counts their executions."""

    def __init__(self) -> None:
        self.graphs, self.calls = 0, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield Backend()
    torch._dynamo.reset()


def compiled(model: Any, backend: Backend) -> Any:
    """What the host's TorchCompileModel gives, with its filter of guards."""
    made = model.clone()
    options = {
        "guard_filter_fn": lambda found: ["transformer_options" not in g.name for g in found]
    }
    # The host's node hands these to its own backends; others are wrapped to take them.
    set_torch_compile_wrapper(
        made, backend=lambda graph, inputs, **kwargs: backend(graph, inputs), options=options
    )
    return made


def per_block(model: Any, backend: Backend) -> Any:
    """What packs do that compile block by block: object patches."""
    made = model.clone()
    for i in range(len(model.model.diffusion_model.blocks)):
        name = f"diffusion_model.blocks.{i}"
        block = torch.compile(model.get_model_object(name), backend=backend, dynamic=False)
        made.add_object_patch(name, block)
    return made


@pytest.mark.parametrize("before", [False, True], ids=["after it", "before it"])
@pytest.mark.parametrize("compile_it", [compiled, per_block])
def test_on_either_side_of_the_node(small_model, store, backend, compile_it, before):
    plain = compile_it(small_model, backend)
    if before:
        ours = compile_it(attach(small_model, store), backend)
    else:
        ours = attach(plain, store)
    assert tried(plain, ours, store) == HIT
    assert backend.calls > 0


@pytest.mark.parametrize("compile_it", [compiled, per_block])
def test_no_graph_is_made_for_carnator(small_model, store, backend, compile_it):
    model = compile_it(small_model, backend)
    sample(model)
    plain = backend.graphs
    ours = attach(model, store)
    for words in (CAPTION, TWEAK, CAPTION, "red circle left on gray"):
        sample(ours, words)
        flush(store)
    assert backend.graphs == plain > 0


def test_nothing_that_watches_is_built_into_a_graph(small_model, store, backend):
    """What a first, observed evaluation hands in would be called in every run that follows."""
    ours = attach(compiled(small_model, backend), store)
    sample(ours)
    flush(store)
    gc.collect()
    watch = part("nodes.observe").AttentionWatch
    assert not [o for o in gc.get_objects() if type(o) is watch]
    (entry,) = store.open().entries()
    sample(attach(small_model, store), TWEAK)
    assert last_report().decision == "hit", last_report().reason  # it is the same model
    sample(attach(small_model, store))
    flush(store)
    assert entry.meta["branched"]


def test_compiled_and_plain_are_donors_to_each_other(small_model, store, backend):
    sample(attach(small_model, store))
    flush(store)
    model = compiled(small_model, backend)
    assert held(sample, model, attach(model, store), TWEAK).decision == "hit"


def test_what_a_compiled_run_leaves_on_the_model_makes_no_other_model(small_model, store, backend):
    """The host takes patches off only when the next run loads its model."""
    before = part("nodes.weights").architecture(small_model)
    sample(per_block(small_model, backend))
    assert part("nodes.weights").architecture(small_model) == before


def test_how_a_compiled_model_is_told(small_file, backend):
    told, small_model = part("nodes.weights").compiled, load(small_file)
    assert not told(small_model, {})
    assert not told(small_model, {"apply_model": {"other": [1]}})
    assert told(compiled(small_model, backend), {"apply_model": {"torch.compile": [1]}})
    assert told(per_block(small_model, backend), {})
