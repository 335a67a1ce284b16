"""The host's own template workflows, from its ``comfyui-workflow-templates`` packages, as prompts.

The editor's file is flattened as the editor does it: subgraphs opened, reroutes followed, muted
nodes left out, bypassed ones passed through.
"""

from __future__ import annotations

import json
import site
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ui_workflow import EDITOR_ONLY, WIDGETS, inputs_in_order, is_widget

MUTED, BYPASSED = 2, 4
INPUT, OUTPUT = -10, -20  # the two ends of a subgraph
Source = tuple[str, Any]  # ("node", [id, output]) or ("value", what a widget says)


def find(name: str) -> dict:
    """A template by its name. Raises FileNotFoundError when no package brings it."""
    for folder in (*site.getsitepackages(), *sys.path):
        for package in sorted(Path(folder).glob("comfyui_workflow_templates*")):
            file = package / "templates" / f"{name}.json"
            if file.is_file():
                return json.loads(file.read_text(encoding="utf-8"))
    raise FileNotFoundError(name)


def models(workflow: dict) -> set[tuple[str, str]]:
    """Folder and name of every model file a template names."""
    subgraphs = workflow.get("definitions", {}).get("subgraphs", [])
    return {
        (model["directory"], model["name"])
        for graph in (workflow, *subgraphs)
        for node in graph["nodes"]
        for model in node.get("properties", {}).get("models", ())
    }


class Level:
    """One graph of a workflow: the whole, or the inside of a subgraph node, whose inputs are fed
    from outside (slot -> source)."""

    def __init__(self, graph: dict, kinds: dict[str, dict], prefix: str, feed: dict[int, Source]):
        self.prefix, self.feed, self.kinds = prefix, feed, kinds
        self.nodes = {node["id"]: node for node in graph["nodes"]}
        self.links: dict[int, tuple[int, int]] = {}
        self.ends: dict[int, int] = {}  # slot of the subgraph's output -> link
        for link in graph["links"]:
            if isinstance(link, dict):
                number, origin = link["id"], (link["origin_id"], link["origin_slot"])
                target = (link["target_id"], link["target_slot"])
            else:
                number, *ends = link
                origin, target = tuple(ends[:2]), tuple(ends[2:4])
            self.links[number] = origin
            if target[0] == OUTPUT:
                self.ends[target[1]] = number
        self._opened: dict[int, Level] = {}

    def inside(self, node: dict) -> Level:
        """The graph in a subgraph node."""
        if node["id"] not in self._opened:
            self._opened[node["id"]] = self._open(node)
        return self._opened[node["id"]]

    def _open(self, node: dict) -> Level:
        kind = self.kinds[node["type"]]
        linked = {slot["name"]: slot.get("link") for slot in node["inputs"]}
        values = list(node.get("widgets_values") or [])
        feed: dict[int, Source] = {}
        for number, slot in enumerate(kind["inputs"]):
            given = None
            if slot["type"] in WIDGETS and values:
                given = values.pop(0)
            source = self.source(linked.get(slot["name"]))
            if source is None and given is not None:
                source = ("value", given)
            if source is not None:
                feed[number] = source
        return Level(kind, self.kinds, f"{self.prefix}{node['id']}:", feed)

    def source(self, link: int | None) -> Source | None:
        """What a link brings, or None where nothing does."""
        if link is None or link not in self.links:
            return None
        origin, slot = self.links[link]
        if origin == INPUT:
            return self.feed.get(slot)
        node = self.nodes[origin]
        if node.get("mode") == MUTED:
            return None
        if node["type"] == "Reroute":
            return self.source(node["inputs"][0].get("link"))
        if node.get("mode") == BYPASSED:
            kind = node["outputs"][slot]["type"]
            same = [i.get("link") for i in node["inputs"] if i["type"] == kind]
            return self.source(next((n for n in same if n is not None), None))
        if node["type"] in self.kinds:
            inner = self.inside(node)
            return inner.source(inner.ends.get(slot))
        return ("node", [f"{self.prefix}{origin}", slot])

    def real(self) -> Iterator[tuple[str, dict, Level]]:
        """Every node that the server gets to see, with its id there."""
        for number, node in self.nodes.items():
            if node.get("mode") in (MUTED, BYPASSED):
                continue
            if node["type"] in self.kinds:
                yield from self.inside(node).real()
            elif node["type"] not in (*EDITOR_ONLY, "Reroute"):
                yield f"{self.prefix}{number}", node, self


def to_prompt(workflow: dict, registry: dict[str, Any]) -> dict:
    """The API format of a template, for the nodes of this host. Raises LookupError with the names
    of nodes that this host does not have."""
    kinds = {kind["id"]: kind for kind in workflow.get("definitions", {}).get("subgraphs", [])}
    found = list(Level(workflow, kinds, "", {}).real())
    missing = sorted({node["type"] for _, node, _ in found} - set(registry))
    if missing:
        raise LookupError(", ".join(missing))
    prompt = {}
    for number, node, level in found:
        schema = {"input": registry[node["type"]].INPUT_TYPES()}
        values = list(node.get("widgets_values") or [])
        given: dict[str, Any] = {}
        for name, kind, options in inputs_in_order(schema):
            if is_widget(kind, options) or "," in str(kind):  # one of several types is a widget too
                if values:
                    given[name] = values.pop(0)
                if options.get("control_after_generate") and values:
                    values.pop(0)
        for slot in node.get("inputs", []):
            source = level.source(slot.get("link"))
            if source is not None:
                given[slot["name"]] = source[1]
        prompt[number] = {"class_type": node["type"], "inputs": given}
    return prompt
