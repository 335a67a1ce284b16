"""The shipped workflows on a real server: hit after a tweak, Cancel, and what the report says."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import numpy as np
import pytest
from harness import ROOT
from live_server import Server, install_pack, node_of, report_of
from PIL import Image
from ui_workflow import load, to_prompt

WORKFLOWS = ("carnator_demo", "carnator_pipeline_demo")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_file: Path):
    base = tmp_path_factory.mktemp("base")
    install_pack(base, demo_file)
    running = Server(base)
    yield running
    running.close()


@pytest.fixture
def prompts(server):
    """The shipped workflows in API format, each with a store of its own (relative: user folder)."""
    info = server.get("/object_info")
    return {n: to_prompt(load(ROOT / "workflows" / f"{n}.json"), info) for n in WORKFLOWS}


def with_store(prompt: dict, where: str) -> dict:
    """The prompt with its records in a folder of its own."""
    prompt = copy.deepcopy(prompt)
    stores = [n for n in prompt.values() if n["class_type"] == "CarnatorStore"]
    if stores:
        stores[0]["inputs"]["where"] = where
    else:
        prompt["900"] = {"class_type": "CarnatorStore", "inputs": {"where": where, "size_gb": 1.0}}
        prompt[node_of(prompt, "CarnatorAccelerate")]["inputs"]["store"] = ["900", 0]
    return prompt


def with_word(prompt: dict, old: str, new: str) -> dict:
    """The prompt with one word of its caption changed."""
    prompt = copy.deepcopy(prompt)
    changed = 0
    for node in prompt.values():
        text = node["inputs"].get("text")
        if isinstance(text, str) and old in text.split():
            node["inputs"]["text"] = text.replace(old, new)
            changed += 1
    assert changed == 1
    return prompt


def frames(server, entry: dict, prompt: dict) -> np.ndarray:
    """The previewed frames of a run, as numbers."""
    images = entry["outputs"][node_of(prompt, "PreviewImage")]["images"]
    opened = [Image.open(io.BytesIO(server.view(image))) for image in images]
    return np.stack([np.asarray(image) for image in opened]).astype(float)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(1e-9, ((a - b) ** 2).mean())))


def succeeded(entry: dict) -> bool:
    return entry["status"]["status_str"] == "success"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_tweak_of_the_shipped_workflow_is_a_hit(server, prompts, name):
    prompt = with_store(prompts[name], f"tweak-{name}")
    first = server.run(prompt)
    assert succeeded(first), first["status"]
    report = report_of(first, prompt)
    assert report["decision"] == "miss" and report["record"] == "submitted"
    assert report["evaluations"] == report["dense_evaluations"] == 30
    tweaked = with_word(prompt, "still", "up")
    second = server.run(tweaked)
    assert succeeded(second), second["status"]
    report = report_of(second, tweaked)
    assert report["decision"] == "hit", report["reason"]
    assert report["dense_evaluations"] == 30
    assert report["evaluations"] * 3 <= 30
    shown = second["outputs"][node_of(tweaked, "CarnatorReport")]
    assert "Decision: hit" in shown["text"][0] and shown["images"]
    steps = [e["data"]["value"] for e in second["events"] if e["type"] == "progress"]
    assert steps and max(steps) == 30  # the progress bar is that of an ordinary run


def test_a_hit_shows_the_clip_of_the_dense_run(server, prompts):
    prompt = with_store(prompts["carnator_demo"], "quality")
    server.run(prompt)
    tweaked = with_word(prompt, "still", "up")
    hit = server.run(tweaked)
    assert report_of(hit, tweaked)["decision"] == "hit"
    off = copy.deepcopy(tweaked)
    off[node_of(off, "CarnatorAccelerate")]["inputs"]["enabled"] = False
    dense = frames(server, server.run(off), off)
    assert psnr(frames(server, hit, tweaked), dense) > 25


def test_a_cancelled_run_leaves_nothing_behind(server, prompts):
    where = "cancelled"
    prompt = with_store(prompts["carnator_demo"], where)
    sampler = node_of(prompt, "KSampler")
    prompt[sampler]["inputs"]["steps"] = 400
    seen = []

    def at_step_five(progress: dict) -> bool:
        late = progress["value"] >= 5 and max(seen, default=0) < 5  # once; events may be left out
        seen.append(progress["value"])
        return late

    entry = server.run(prompt, at_step_five)
    assert not succeeded(entry)
    assert any(e["type"] == "execution_interrupted" for e in entry["events"])
    assert max(seen) < 400
    folder = server.base / "user" / where
    assert not list(folder.rglob("*.val"))
    prompt[sampler]["inputs"]["steps"] = 30
    after = server.run(prompt)
    assert succeeded(after)
    report = report_of(after, prompt)
    assert report["decision"] == "miss" and report["evaluations"] == 30
    assert report["record"] == "submitted"
    off = copy.deepcopy(prompt)
    off[node_of(off, "CarnatorAccelerate")]["inputs"]["enabled"] = False
    dense = server.run(off)
    assert np.array_equal(frames(server, after, prompt), frames(server, dense, off))
    again = with_word(prompt, "still", "up")
    report = report_of(server.run(again), again)
    assert report["decision"] == "hit" and report["d0"] is not None  # the record can be read


def test_the_editor_is_given_the_text_of_the_report(server):
    """The editor shows no text of a node by itself; without this file the report is mute."""
    assert "/extensions/ComfyUI-Carnator/carnator.js" in server.get("/extensions")


def test_wrong_input_is_told_at_its_node(server, prompts):
    prompt = prompts["carnator_demo"]
    accelerate = node_of(prompt, "CarnatorAccelerate")
    wrong = copy.deepcopy(prompt)
    wrong[accelerate]["inputs"]["preset"] = "superb"
    error = server.refused(wrong)["node_errors"][accelerate]
    assert "superb" in str(error) and "balanced" in str(error)
    wrong = with_word(prompt, "circle", "pentagon")
    assert "pentagon" in str(server.refused(wrong)["node_errors"])
    wrong = with_store(prompt, str(server.base / "server.log"))  # a file, not a folder
    entry = server.run(wrong)
    (error,) = [e["data"] for e in entry["events"] if e["type"] == "execution_error"]
    assert error["node_type"] == "CarnatorStore"
    assert "server.log" in error["exception_message"]


def test_the_server_log_is_clean(server, prompts):
    text = server.log.read_text()
    at_start = text.split("To see the GUI go to")[0]
    frames = [line for line in at_start.splitlines() if line.startswith('  File "')]
    assert not [line for line in frames if "ComfyUI-Carnator" in line]
    (loaded,) = [
        line
        for line in at_start.splitlines()
        if "custom_nodes/ComfyUI-Carnator" in line and "seconds" in line
    ]
    assert "IMPORT FAILED" not in loaded
    assert "[Carnator] internal error" not in text
    assert "could not start" not in text
