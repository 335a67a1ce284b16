"""Every bundled model, loaded by the host's own loader: it runs there, as in the embedded host,
and in its shipped workflow."""

from __future__ import annotations

import copy
from typing import Any

import comfy.sd
import pytest
import torch
from conftest import load
from harness import ROOT, hand_over, part
from live_server import Server, install_pack, node_of, report_of
from sampling import CAPTION, SEED, last_report
from test_demo_families import sampled
from test_server import succeeded, with_store, with_word
from ui_workflow import load as load_workflow
from ui_workflow import to_prompt

families = part("carnator.demo.families")
# tests/unit/test_families.py sees to it that none is missing.
BUNDLED = [family for family in families.FAMILIES.values() if family.path.is_file()]
HOST_CLASSES = {"wan": "WAN21", "hunyuan": "HunyuanVideo", "ltx": "LTXV"}
WORKFLOWS = {
    "wan": "carnator_demo",
    "hunyuan": "carnator_demo_hunyuan",
    "ltx": "carnator_demo_ltx",
}
TWEAK = CAPTION.replace("still", "up")
every_bundled = pytest.mark.parametrize("family", BUNDLED, ids=[f.name for f in BUNDLED])


@every_bundled
def test_the_hosts_loader_takes_the_file_as_it_is(family):
    model = comfy.sd.load_diffusion_model(str(family.path))
    assert type(model.model).__name__ == HOST_CLASSES[family.name]
    ours = part("carnator.demo.model").EmbeddedModel.load(family.path)
    theirs = model.model.diffusion_model.state_dict()
    for name, value in ours.network.state_dict().items():
        assert torch.equal(theirs[name], value), name


@every_bundled
def test_the_clips_show_what_the_captions_ask(family):
    """Enough to tell a trained model from noise; ``carnator demo check`` says how good it is."""
    model, captions = load(family.path), part("carnator.demo.captions")
    latent = part("nodes.demo").CarnatorDemoEmptyLatent.execute(model=model)[0]
    right = []
    for text in ("red circle up on white", "blue square still on black", CAPTION):
        made = part("nodes.host").model_space(model, sampled(model, latent, text, steps=30))
        clip = family.to_clip(made[0])
        right.append(part("carnator.demo.quality").attributes_right(clip, captions.parse(text)))
    assert sum(right) / len(right) > 0.65, right


@every_bundled
def test_a_dense_run_and_a_reused_one_agree_with_the_embedded_host(
    family, store, tmp_path, monkeypatch
):
    """The same decisions, evaluations and latents (to 1e-3), here and there, by a table of the
    tests' own: what was measured of these models is no matter here."""
    matching = part("carnator.matching")
    table = matching.table_for("random")
    monkeypatch.setattr(matching, "table_for", lambda architecture: table)
    ours = part("carnator.demo.model").EmbeddedModel.load(family.path)
    settings = part("carnator.request").Settings("custom", 42.0)
    theirs = part("nodes.host").attach(load(family.path), settings, store)
    latent = part("nodes.demo").CarnatorDemoEmptyLatent.execute(model=theirs)[0]
    decisions = []
    with part("carnator.store").Store(tmp_path / "embedded") as records:
        for text in (CAPTION, TWEAK, CAPTION):
            result = part("carnator.demo.host").generate(
                ours,
                part("carnator.demo.captions").parse(text),
                seed=SEED,
                settings=settings,
                store=records,
            )
            records.flush()
            made = sampled(theirs, latent, text, steps=30)
            store.open().flush()
            report = last_report()
            decisions.append(report.decision)
            assert (report.decision, report.evaluations) == (
                result.report.decision,
                result.report.evaluations,
            )
            inside = part("nodes.host").model_space(theirs, made)
            near = 1e-3 if report.decision == "hit" else 1e-4
            assert (inside - result.latent).abs().max() < near
            if report.decision == "miss":
                hand_over(records, store.open())
    assert decisions == ["miss", "hit", "exact"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_file: Any) -> Any:
    base = tmp_path_factory.mktemp("base")
    install_pack(base, demo_file)
    running = Server(base)
    yield running
    running.close()


@every_bundled
def test_the_shipped_workflow_runs(server, family):
    workflow = load_workflow(ROOT / "workflows" / f"{WORKFLOWS[family.name]}.json")
    prompt = with_store(to_prompt(workflow, server.get("/object_info")), f"flow-{family.name}")
    loader = prompt[node_of(prompt, "CarnatorLoadDemoModel")]
    assert loader["inputs"]["model_name"] == family.path.stem
    first = server.run(prompt)
    assert succeeded(first), first["status"]
    report = report_of(first, prompt)
    assert report["decision"] == "miss" and report["record"] == "submitted"
    assert len(first["outputs"][node_of(prompt, "PreviewImage")]["images"]) == 4
    tweaked = with_word(copy.deepcopy(prompt), "still", "up")
    second = server.run(tweaked)
    assert succeeded(second), second["status"]
    report = report_of(second, tweaked)
    assert report["decision"] in ("hit", "miss") and report["reason"]
