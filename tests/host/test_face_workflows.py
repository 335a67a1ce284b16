"""The shipped workflows as files: accepted by this host's schema, laid out to be read, pictured."""

from __future__ import annotations

import copy
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from PIL import Image
from ui_workflow import EDITOR_ONLY, inputs_in_order, is_widget, load, to_prompt

FILES = sorted((ROOT / "workflows").glob("*.json"))
TITLE = 30  # pixels of a node's title, above its position
MODELS = ("UNETLoader", "CLIPLoader", "DualCLIPLoader", "VAELoader", "CheckpointLoaderSimple")

each = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def box(node: dict) -> tuple[float, float, float, float]:
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - TITLE, x + width, y + height


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def without_the_newest(schema: dict[str, Any], values: list[Any]) -> None:
    """Drop the last optional widgets of a host's node that no values are given for, and the values
    of combos that bring widgets of their own, which older hosts have as plain ones."""
    inputs = inputs_in_order(schema)
    widgets = [(name, options) for name, kind, options in inputs if is_widget(kind, options)]
    wanted = sum(1 + bool(options.get("control_after_generate")) for _, options in widgets)
    for name, _ in reversed(widgets):
        if wanted > len(values) and schema["input"].get("optional", {}).pop(name, None):
            wanted -= 1
    if any(str(kind).startswith("COMFY_DYNAMICCOMBO") for _, kind, _ in inputs):
        del values[wanted:]


@each
def test_the_host_accepts_it(path, registry):
    workflow = load(path)
    kinds = {node["type"] for node in workflow["nodes"]} - set(EDITOR_ONLY)
    info: dict[str, Any] = {
        kind: copy.deepcopy(
            {"input": registry[kind].INPUT_TYPES(), "output": registry[kind].RETURN_TYPES}
        )
        for kind in kinds
    }
    for node in workflow["nodes"]:  # the editor fills in what newer hosts ask for besides
        if node["type"] in info and not node["type"].startswith("Carnator"):
            without_the_newest(info[node["type"]], node["widgets_values"])
    for node in workflow["nodes"]:  # a user has the model files that it names
        named = [model["name"] for model in node["properties"].get("models", ())]
        assert not named or node["type"] in MODELS
        if node["type"] in MODELS:
            assert named and set(named) <= set(node["widgets_values"])
            for name, spec in info[node["type"]]["input"]["required"].items():
                if (isinstance(spec[0], list) and name.endswith("_name")) or name.endswith(
                    ("1", "2")
                ):
                    info[node["type"]]["input"]["required"][name] = ([*spec[0], *named], {})
    prompt = to_prompt(workflow, info)
    used = {node["class_type"] for node in prompt.values()}
    assert "CarnatorReport" in used
    assert used & {"CarnatorAccelerate", "CarnatorSparseAttentionSampler"}
    numbers = [v for n in prompt.values() for k, v in n["inputs"].items() if "seed" in k]
    assert numbers, "nothing says which noise is used"
    for node in workflow["nodes"]:
        assert "randomize" not in node.get("widgets_values", []), "reuse needs a fixed seed"


@each
def test_its_nodes_stand_apart_and_inside_their_groups(path):
    workflow = load(path)
    boxes = {f"{n['id']} {n['type']}": box(n) for n in workflow["nodes"]}
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        assert not overlap(a, b), f"{one} lies over {other}"
    groups = {g["title"]: g["bounding"] for g in workflow["groups"]}
    for name, (left, top, right, bottom) in boxes.items():
        for title, (x, y, width, height) in groups.items():
            if overlap((left, top, right, bottom), (x, y, x + width, y + height)):
                inside = x <= left and y <= top and right <= x + width and bottom <= y + height
                assert inside, f"{name} sticks out of {title!r}"


@each
def test_it_has_a_picture(path):
    with Image.open(path.with_suffix(".jpg")) as picture:
        assert picture.format == "JPEG" and 300 <= picture.width <= 640
    assert path.with_suffix(".jpg").stat().st_size < 100_000


@each
def test_it_names_models_by_the_host_s_own_links(path):
    for node in load(path)["nodes"]:
        for model in node["properties"].get("models", ()):
            assert re.match(
                r"https://huggingface\.co/Comfy-Org/|https://huggingface\.co/", model["url"]
            )
            assert model["name"] in model["url"] and model["directory"]


def test_ids_are_unlike_each_other():
    ids = [json.loads(path.read_text())["id"] for path in FILES]
    assert len(set(ids)) == len(ids) > 4
    pictures = {p.stem for p in Path(ROOT / "workflows").glob("*.jpg")}
    assert pictures == {p.stem for p in FILES}
