"""The node in a graph that the host itself executes, with every way of keeping nodes' outputs."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
from harness import part
from machine import CACHES, Failed, Machine, node, report_in
from sampling import CAPTION, TWEAK, last_report


@pytest.fixture
def graph(registry, small_file, store, monkeypatch, tmp_path):
    """Loader, Accelerate, sampler and Report, in API format."""
    import folder_paths

    places = ([str(small_file.parent)], {".safetensors"})
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", places)
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))
    folder_paths.filename_list_cache.clear()
    return {
        "1": node("UNETLoader", unet_name=small_file.name, weight_dtype="default"),
        "2": node("CarnatorStore", where=str(store.folder), size_gb=1.0),
        "3": node(
            "CarnatorAccelerate",
            model=["1", 0],
            preset="custom",
            noise_policy="keep",
            enabled=True,
            budget_db=25.0,
            record=True,
            exact_hits=True,
            sparse_attention="off",
            store=["2", 0],
        ),
        "4": node("CarnatorDemoCaption", text=CAPTION),
        "5": node("CarnatorDemoCaption", text=""),
        "6": node("EmptyHunyuanLatentVideo", width=64, height=64, length=13, batch_size=1),
        "7": node(
            "KSampler",
            model=["3", 0],
            seed=7,
            steps=8,
            cfg=2.5,
            sampler_name="euler",
            scheduler="simple",
            positive=["4", 0],
            negative=["5", 0],
            latent_image=["6", 0],
            denoise=1.0,
        ),
        "8": node("CarnatorReport", latent=["7", 0]),
    }


def changed(graph: dict, number: str, **inputs: Any) -> dict:
    made = copy.deepcopy(graph)
    made[number]["inputs"].update(inputs)
    return made


def run(machine: Machine, graph: dict, store: Any) -> dict:
    report = report_in(machine.run(graph), "8")
    store.open().flush()
    return report


@pytest.fixture
def quick_collections():
    """The host collects garbage after every output it drops under pressure; what was there before
    the test need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(("cache", "ram"), [*((c, 0.0) for c in CACHES), ("ram_pressure", 1e6)])
def test_every_kind_of_node_cache(graph, store, quick_collections, cache, ram):
    machine = Machine(cache, ram)
    assert run(machine, graph, store)["decision"] == "miss"
    tweak = changed(graph, "4", text=TWEAK)
    report = run(machine, tweak, store)
    assert report["decision"] == "hit" and report["evaluations"] < report["dense_evaluations"]
    assert ("3" in machine.ran) == (cache == "none" or bool(ram))
    third = changed(graph, "4", text="red circle left on gray")
    assert run(machine, third, store)["decision"] == "hit"  # nothing was spent on the second
    assert run(Machine(cache, ram), graph, store)["decision"] == "exact"  # a new session


def test_what_has_run_is_not_run_again(graph, store):
    machine = Machine("classic")
    run(machine, graph, store)
    before = last_report()
    machine.run(graph)
    assert last_report() is before and "7" not in machine.ran


def test_switched_off_and_removed(graph, store):
    machine = Machine("classic")
    run(machine, graph, store)
    off = changed(changed(graph, "3", enabled=False), "4", text=TWEAK)
    before = last_report()
    machine.run(off)
    assert last_report() is before
    removed = changed(changed(graph, "7", model=["1", 0]), "4", text="blue square up on gray")
    machine.run(removed)
    assert last_report() is before


def test_a_donor_is_called_by_its_prompt(graph, store):
    """The sampler never sees the words; the graph that runs has them."""
    machine = Machine("classic")
    run(machine, graph, store)
    (entry,) = store.open().entries()
    assert entry.meta["label"] == CAPTION
    report = run(machine, changed(graph, "4", text=TWEAK), store)
    assert report["decision"] == "hit" and report["donor_label"] == CAPTION
    # The node itself was not executed again, and no other identity came of it.
    assert "3" not in machine.ran
    assert run(machine, graph | {"9": node("CarnatorDemoCaption", text="")}, store)


def test_names_do_not_make_other_requests(graph, store, monkeypatch):
    machine = Machine("none")
    with monkeypatch.context() as nameless:
        nameless.setattr(part("nodes.request"), "prompt_words", lambda: "")
        run(machine, graph, store)
    assert run(Machine("none"), graph, store)["decision"] == "exact"


def test_the_words_are_found_behind_other_nodes(registry):
    found = part("nodes.naming").found

    class Graph(dict):
        def has_node(self, number: str) -> bool:
            return number in self

        def get_node(self, number: str) -> dict:
            return self[number]

    graph = Graph(
        {
            "1": node("CLIPTextEncode", text=["2", 0], clip=["9", 0]),
            "2": node("PrimitiveStringMultiline", value="  a fox\nin snow "),
            "3": node("CLIPTextEncode", text="blurry", clip=["9", 0]),
            "4": node("WanImageToVideo", negative=["3", 0], positive=["1", 0], vae=["9", 0]),
            "5": node("CFGGuider", model=["9", 0], positive=["4", 0], negative=["4", 1], cfg=3.0),
            "6": node("SamplerCustomAdvanced", guider=["5", 0], noise=["9", 0], sigmas=["9", 0]),
            "7": node("KSampler", positive=["8", 0], negative=["3", 0], model=["9", 0]),
            "8": node("ConditioningLoop", conditioning=["8", 0]),
            "9": node("UNETLoader", unet_name="model.safetensors"),
        }
    )
    assert next(found(graph, "6")).split() == ["a", "fox", "in", "snow"]
    assert next(found(graph, "7"), "") == ""  # a circle, and no words of the negative
    assert next(found(graph, "nowhere"), "") == ""


def test_outside_a_graph_a_run_has_no_name(small_model, store):
    from sampling import flush, sample
    from trial import attach

    sample(attach(small_model, store))
    flush(store)
    (entry,) = store.open().entries()
    assert entry.meta["label"] == ""
    sample(attach(small_model, store), TWEAK)
    assert last_report().donor_label.startswith("seed 7, made ")


def test_a_prompt_the_host_refuses(graph):
    with pytest.raises(Failed, match="superb"):
        Machine().run(changed(graph, "3", preset="superb"))
