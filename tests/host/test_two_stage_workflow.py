"""The shipped graph for two-expert models: accepted by the server, and reused in both stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from harness import ROOT
from machine import Machine, node, report_in, validated
from test_templates import (
    KEPT,
    TEMPLATES,
    changed_word,
    executable,
    latents,
    prompt_of,  # noqa: F401  a fixture
    samplers,
    with_weights,
)
from trial import FLOOR, psnr, same
from ui_workflow import load, to_prompt

FILE = ROOT / "workflows" / "carnator_wan22_two_stages.json"
REPORTS = {"12": "16", "13": "17"}  # sampler -> its Report node


@pytest.fixture
def prompt(registry, prompt_of) -> dict[str, Any]:  # noqa: F811
    """The graph in API format, with an empty file for every model it names."""
    workflow = prompt_of.files(load(FILE))
    info = {
        name: {"input": kind.INPUT_TYPES(), "output": kind.RETURN_TYPES}
        for name, kind in registry.items()
        if name in {n["type"] for n in workflow["nodes"]}
    }
    return to_prompt(workflow, info)


def test_the_server_accepts_it(prompt):
    """As it is, and its model files are those of the host's own template."""
    assert sorted(validated(prompt)) == ["15", "16", "17"]
    named = {v for n in prompt.values() for v in n["inputs"].values() if isinstance(v, str)}
    theirs = {name for _, name in _template_models()}
    assert {name for name in named if name.endswith(".safetensors")} <= theirs


def _template_models() -> set[tuple[str, str]]:
    import templates

    try:
        return templates.models(templates.find(TEMPLATES["Wan 2.2 14B"].name))
    except FileNotFoundError:
        pytest.skip("the template package of this host has no Wan 2.2 14B")


def test_a_changed_word_is_reused_in_both_stages(prompt, store):
    """What stage one leaves after a hit is new; stage two's own reuse stays intact."""
    template = TEMPLATES["Wan 2.2 14B"]
    ours = executable(prompt, template)
    assert samplers(ours) == list(REPORTS)
    with_weights(ours, template.family)
    ours["store"] = node("CarnatorStore", where=str(store.folder), size_gb=1.0)
    for item in ours.values():
        if item["class_type"] == "CarnatorAccelerate":
            given = {"preset": "custom", "budget_db": FLOOR, "store": ["store", 0]}
            item["inputs"].update(given)
    for sampler, report in REPORTS.items():
        ours[report] = node("CarnatorReport", latent=[sampler, 0])
    decisions = []
    for words in (ours, changed_word(ours), ours):
        reports, got = _run(words, store)
        decisions.append([r["decision"] for r in reports])
        expected = latents(_without(words))
        near = all(psnr(a, b) >= FLOOR for a, b in zip(got, expected, strict=True))
        assert near if "hit" in decisions[-1] else all(map(same, got, expected))
    assert decisions == [["miss", "miss"], ["hit", "hit"], ["exact", "exact"]]


def _run(prompt: dict, store: Any) -> tuple[list[dict], list[Any]]:
    KEPT.clear()
    outputs = Machine().run(prompt)  # with nothing kept: the third prompt is sampled anew
    store.open().flush()
    return [report_in(outputs, r) for r in REPORTS.values()], [KEPT[s] for s in REPORTS]


def _without(prompt: dict) -> dict:
    """The same graph with Carnator switched off and its reports left out."""
    made = {n: copy.deepcopy(i) for n, i in prompt.items() if n not in REPORTS.values()}
    for item in made.values():
        if item["class_type"] == "CarnatorAccelerate":
            item["inputs"]["enabled"] = False
    return made
