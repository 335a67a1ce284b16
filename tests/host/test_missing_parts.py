"""A host without something the pack uses: the other nodes load, and one line says what is gone."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from typing import Any

import pytest
import torch
from harness import PACK, ROOT, part
from sampling import sample

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ALL = {node.__name__ for node in part("nodes").NODES}
PIPELINE = {
    "CarnatorProbe",
    "CarnatorSignatureMatch",
    "CarnatorReuseScope",
    "CarnatorSparseAttentionSampler",
}
DEMO = {name for name in ALL if "Demo" in name}
# Module of the host, or of what it brings -> nodes that go with it, and what the log calls them.
HIDDEN = {
    "comfy_extras.nodes_custom_sampler": (PIPELINE, "the nodes of the pipeline"),
    "comfy.sd": (DEMO, "the nodes of the demo"),
    "aiohttp": (set(), "the sidebar's routes"),
    "comfy.extra_samplers": (set(), ""),
    "comfy_execution.progress": (set(), ""),
}


@pytest.fixture
def loaded(monkeypatch):
    """Loads the pack anew under another name, with a module hidden."""
    names: list[str] = []

    def load(hidden: str) -> Any:
        name = f"{PACK}_without_{len(names)}"
        names.append(name)
        parent, _, child = hidden.rpartition(".")
        monkeypatch.setitem(sys.modules, hidden, None)
        if parent and hasattr(sys.modules.get(parent), child):
            monkeypatch.delattr(sys.modules[parent], child)
        place = {"submodule_search_locations": [str(ROOT)]}
        spec = importlib.util.spec_from_file_location(name, ROOT / "__init__.py", **place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return asyncio.run(module.comfy_entrypoint())

    yield load
    for loaded_name in list(sys.modules):
        if loaded_name.split(".")[0] in names:
            del sys.modules[loaded_name]


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_rest_loads_and_the_log_says_why(loaded, caplog, hidden):
    gone, called = HIDDEN[hidden]
    with caplog.at_level(logging.WARNING, logger="carnator"):
        extension = loaded(hidden)
        nodes = asyncio.run(extension.get_node_list())
        asyncio.run(extension.on_load())
    assert {node.__name__ for node in nodes} == ALL - gone
    for node in nodes:
        node.GET_SCHEMA()
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("[Carnator]")]
    said = [line for line in said if "without" in line]
    assert len(said) == bool(called), said
    if called:
        assert called in said[0] and hidden.rpartition(".")[2] in said[0]


def test_what_is_left_still_works(loaded, small_model, tmp_path):
    """Accelerate on a host whose own samplers were moved: the run is the model's own."""
    nodes = asyncio.run(loaded("comfy.extra_samplers").get_node_list())
    name = nodes[0].__module__.split(".")[0]
    home = sys.modules[f"{name}.nodes.host"]
    settings = sys.modules[f"{name}.carnator.request"].Settings()
    store = home.StoreChoice(tmp_path / "store", 2**30)
    for sampler in ("euler", "uni_pc"):
        got = sample(home.attach(small_model, settings, store), sampler=sampler)
        assert torch.equal(got, sample(small_model, sampler=sampler))
    store.open().close()


def test_the_version_named_is_the_one_promised():
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["comfy"]
    assert promised["requires-comfyui"] == f">={part('nodes.loading').TESTED}"
