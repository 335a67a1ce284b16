"""Turns a workflow as the editor saves it into what the server runs, by the server's own schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
CONTROL = ("fixed", "increment", "decrement", "randomize")
EDITOR_ONLY = ("Note", "MarkdownNote")


def inputs_in_order(schema: dict) -> list[tuple[str, Any, dict]]:
    """Name, type and options of every input, in the order the editor shows them."""
    found = []
    for group in ("required", "optional"):
        for name, spec in schema["input"].get(group, {}).items():
            found.append((name, spec[0], spec[1] if len(spec) > 1 else {}))
    return found


def is_widget(kind: Any, options: dict) -> bool:
    return (isinstance(kind, list) or kind in WIDGETS) and not options.get("forceInput")


def to_prompt(workflow: dict, object_info: dict) -> dict:
    """The API format of a workflow. Raises AssertionError where it does not fit the schema."""
    links = {link[0]: link for link in workflow["links"]}
    kinds = {node["id"]: node["type"] for node in workflow["nodes"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in EDITOR_ONLY:
            continue
        assert node["type"] in object_info, f"no node {node['type']} on this server"
        schema = object_info[node["type"]]
        slots = {slot["name"]: slot.get("link") for slot in node.get("inputs", [])}
        values = list(node.get("widgets_values", []))
        given: dict[str, Any] = {}
        for name, kind, options in inputs_in_order(schema):
            if is_widget(kind, options):
                assert values, f"{node['type']} has no value for {name}"
                given[name] = values.pop(0)
                check_value(node["type"], name, kind, options, given[name])
                if options.get("control_after_generate"):
                    assert values.pop(0) in CONTROL
            if slots.get(name) is not None:
                _, source, output, target, slot, link_kind = links[slots[name]]
                assert target == node["id"] and node["inputs"][slot]["name"] == name
                outputs = object_info[kinds[source]]["output"]
                assert outputs[output] == link_kind == kind, (node["type"], name)
                given[name] = [str(source), output]
        assert not values, f"{node['type']} has values too many: {values}"
        unknown = set(slots) - {name for name, _, _ in inputs_in_order(schema)}
        assert not unknown, f"{node['type']} has no inputs {unknown}"
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": given}
    return prompt


def check_value(node: str, name: str, kind: Any, options: dict, value: Any) -> None:
    choices = kind if isinstance(kind, list) else options.get("options")
    if kind == "COMBO" or isinstance(kind, list):
        assert value in choices, f"{node}.{name}: {value!r} is not one of {choices}"
    else:
        types = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}
        assert isinstance(value, types[kind]), f"{node}.{name}: {value!r} is no {kind}"
        if "min" in options:
            assert options["min"] <= value <= options["max"], f"{node}.{name}: {value}"


def load(path: Path) -> dict:
    return json.loads(path.read_text())
