"""What the editor is told of the nodes, and what the pack does where there is no host."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import folder_paths
import pytest
import torch
from harness import ROOT, load_pack, part
from PIL import Image
from sampling import CAPTION

NODES = part("nodes").NODES
KINDS = {
    "CarnatorAccelerate": (["MODEL"], ["MODEL"]),
    "CarnatorProbe": (["NOISE", "GUIDER", "SAMPLER", "SIGMAS", "LATENT"], ["CARNATOR_PROBE"]),
    "CarnatorSignatureMatch": (
        ["CARNATOR_PROBE"],
        ["CARNATOR_MATCH", "BOOLEAN", "CARNATOR_REPORT"],
    ),
    "CarnatorReuseScope": (["CARNATOR_MATCH"], ["CARNATOR_SCOPE", "IMAGE"]),
    "CarnatorSparseAttentionSampler": (
        ["NOISE", "GUIDER", "SAMPLER", "SIGMAS", "LATENT"],
        ["LATENT", "LATENT", "CARNATOR_REPORT"],
    ),
    "CarnatorStore": ([], ["CARNATOR_STORE"]),
    "CarnatorReport": ([], ["LATENT", "STRING", "IMAGE"]),
    "CarnatorLoadDemoModel": ([], ["MODEL"]),
    "CarnatorDemoCaption": ([], ["CONDITIONING"]),
    "CarnatorDemoEmptyLatent": ([], ["LATENT"]),
    "CarnatorDemoDecode": (["LATENT", "MODEL"], ["IMAGE"]),
}
WIDGETS = ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")


@pytest.mark.parametrize("node", NODES, ids=lambda n: n.__name__)
def test_every_part_of_a_node_explains_itself(node):
    schema = node.GET_SCHEMA()
    assert schema.display_name.startswith("Carnator ")
    assert schema.category.split("/")[0] == "Carnator"
    assert len(schema.description) > 40 and schema.search_aliases
    for item in (*schema.inputs, *schema.outputs):
        assert item.tooltip and item.tooltip.endswith("."), (schema.node_id, item.id)


@pytest.mark.parametrize("node", NODES, ids=lambda n: n.__name__)
def test_sockets_are_those_of_the_blueprint(node):
    schema = node.GET_SCHEMA()
    inputs = [i.get_io_type() for i in schema.inputs if not i.optional]
    sockets = [kind for kind in inputs if kind not in WIDGETS]
    assert (sockets, [o.get_io_type() for o in schema.outputs]) == KINDS[schema.node_id]


def test_the_extension_lists_every_node_once():
    extension = asyncio.run(load_pack().comfy_entrypoint())
    listed = asyncio.run(extension.get_node_list())
    assert sorted(n.GET_SCHEMA().node_id for n in listed) == sorted(KINDS)
    assert not hasattr(load_pack(), "NODE_CLASS_MAPPINGS")


def described(node) -> dict:
    """A node's texts in the shape of the editor's translation files."""
    schema = node.GET_SCHEMA()
    return {
        "display_name": schema.display_name,
        "description": schema.description,
        "inputs": {
            i.id: {"name": i.display_name or i.id, "tooltip": i.tooltip} for i in schema.inputs
        },
        "outputs": {
            str(n): {"name": o.display_name or o.get_io_type(), "tooltip": o.tooltip}
            for n, o in enumerate(schema.outputs)
        },
    }


def test_the_english_texts_are_those_of_the_nodes():
    """Translations start from this file, so it must not fall behind."""
    held = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text())
    assert held == {n.GET_SCHEMA().node_id: described(n) for n in NODES}


def test_the_pack_imports_without_the_host(tmp_path):
    """Test runners and tools import the folder as a package; that must do nothing."""
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('pack', {str(ROOT / '__init__.py')!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert callable(module.comfy_entrypoint)\n"
        "assert 'torch' not in sys.modules and 'comfy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_the_engine_does_not_know_the_host():
    for file in (ROOT / "carnator").rglob("*.py"):
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]) and len(words) > 1:
                assert words[1].split(".")[0] not in ("comfy", "comfy_api", "folder_paths", "nodes")


def test_only_some_files_meet_the_host():
    """Patching is the work of one file; reading a request that of another."""
    for file in (ROOT / "nodes").glob("*.py"):
        text = file.read_text()
        if file.name != "host.py":
            assert "add_wrapper" not in text and "add_object_patch" not in text, file.name


def test_demo_nodes_make_a_clip(demo_model, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))
    demo = part("nodes.demo")
    latent = demo.CarnatorDemoEmptyLatent.execute()[0]
    assert latent["samples"].shape == (1, 16, 4, 16, 16)
    (cond, extra), *_ = demo.CarnatorDemoCaption.execute(CAPTION)[0]
    assert cond.shape == (1, 12, 64) and extra["pooled_output"].shape == (1, 768)
    assert demo.CarnatorDemoCaption.execute(CAPTION, demo_model)[0][0][1] == {}
    clips = part("carnator.demo.clips")
    import random

    clip = clips.render(part("carnator.demo.captions").parse(CAPTION), random.Random(0))
    outside = demo_model.get_model_object("latent_format").process_out(clips.to_latent(clip)[None])
    decoded = demo.CarnatorDemoDecode.execute({"samples": outside}, demo_model, 4)
    frames = decoded[0]
    assert frames.shape == (4, 128, 128, 3)
    (shown,) = decoded.ui.as_dict()["images"]
    with Image.open(tmp_path / shown["filename"]) as moving:
        assert moving.n_frames == 4 and moving.size == (128, 128)
    small = frames[:, ::4, ::4].permute(3, 0, 1, 2) * 2 - 1
    assert torch.allclose(small, clip, atol=1e-4)


def test_the_default_store_is_out_of_reach_of_the_server():
    choice = part("nodes.store").chosen_store()
    assert choice.folder.is_absolute()
    assert any(p.name.startswith("__") for p in (choice.folder, *choice.folder.parents))
    assert part("nodes.store").chosen_store("inside", 2).folder.name == "inside"
    assert part("nodes.store").chosen_store("inside", 2).size_limit == 2 * 2**30
    absolute = Path("/some/where").resolve()
    assert part("nodes.store").chosen_store(str(absolute)).folder == absolute
