"""Every embedded backbone: its latents, its checkpoints, its training, its runs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image

from carnator.demo import captions, clips, curve, families, host, train
from carnator.demo.hunyuan import HunyuanConfig
from carnator.demo.ltx import LTXConfig
from carnator.demo.model import EmbeddedModel, with_lora
from carnator.demo.recipe import Recipe
from carnator.demo.wan import WanConfig
from carnator.request import Settings
from carnator.store import Store

CAPTION = captions.parse("red circle left on gray")
TINY = {
    "wan": WanConfig(dim=24, ffn_dim=32, num_heads=2, num_layers=2),
    "hunyuan": HunyuanConfig(double_blocks=1, single_blocks=1),
    "ltx": LTXConfig(dim=24, num_heads=2, num_layers=2),
}
every_family = pytest.mark.parametrize("name", sorted(families.FAMILIES))


def tiny(name: str) -> torch.nn.Module:
    family = families.named(name)
    network = family.network(TINY[name])
    network.initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a network whose output is zero shows nothing
        for p in network.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    return network


@pytest.fixture(params=sorted(families.FAMILIES))
def checkpoint(request, tmp_path):
    path = tmp_path / f"{request.param}.safetensors"
    train.save_model(path, tiny(request.param).state_dict(), TINY[request.param])
    return request.param, path


@every_family
def test_clips_fold_into_latents_of_the_familys_shape_and_back(name):
    family = families.named(name)
    clip = clips.render(CAPTION, random.Random(1))
    latent = family.to_latent(clip)
    assert latent.shape == family.shape[1:]
    assert torch.equal(family.to_clip(latent), clip)
    assert latent[: family.live_channels].flatten(1).any(1).all()
    assert not latent[family.live_channels :].any()
    pair = torch.stack([clip, clip.flip(1)])
    assert torch.equal(family.to_clip(family.to_latent(pair)), pair)


def test_a_fold_into_too_few_channels_is_refused():
    with pytest.raises(ValueError, match="needs 96 channels, not 16"):
        clips.to_latent(torch.zeros(3, 4, 32, 32), (2, 4, 4), 16)


def test_a_checkpoint_tells_its_family_and_sizes(checkpoint):
    name, path = checkpoint
    model = EmbeddedModel.load(path)
    assert model.family is families.named(name) and model.config == TINY[name]
    others = [f for f in families.FAMILIES.values() if f is not model.family]
    names = set(model.network.state_dict())
    assert model.family.marker in names
    assert not any(other.marker in names for other in others)


def test_a_foreign_checkpoint_is_refused(tmp_path):
    path = tmp_path / "foreign.safetensors"
    train.save_model(path, {"unet.weight": torch.zeros(1)}, TINY["wan"])
    with pytest.raises(ValueError, match="none of its tensors belong"):
        EmbeddedModel.load(path)
    with pytest.raises(ValueError, match="Linear is not the network"):
        EmbeddedModel(torch.nn.Linear(1, 1), "x")
    with pytest.raises(ValueError, match="Recipe is not the config"):
        families.of_config(Recipe())
    with pytest.raises(ValueError, match="Unknown backbone 'sora'"):
        families.named("sora")


def test_a_run_is_watched_reused_and_untouched_by_a_miss(checkpoint, tmp_path):
    _, path = checkpoint
    model = EmbeddedModel.load(path)
    plain = host.generate(model, CAPTION, seed=3, steps=6)
    assert plain.latent.shape == model.family.shape
    assert plain.clip.shape == (3, clips.FRAMES, clips.SIZE, clips.SIZE)
    with Store(tmp_path / "store") as store:
        fields = {"seed": 3, "steps": 6, "settings": Settings(), "store": store}
        watched = host.generate(model, CAPTION, **fields)
        store.flush()
        again = host.generate(model, CAPTION, **fields)
        patched = host.generate(with_lora(model, 0.05), CAPTION, **fields)
    assert watched.report.decision == "miss" and again.report.decision == "exact"
    assert torch.equal(plain.latent, watched.latent) and torch.equal(plain.latent, again.latent)
    assert patched.report.decision != "exact"


def test_a_lora_changes_the_block_matrices_and_nothing_else(checkpoint):
    _, path = checkpoint
    model = EmbeddedModel.load(path)
    before = {k: v.clone() for k, v in model.network.state_dict().items()}
    matrices = {id(p) for p in model.network.matrices()}
    names = {n for n, p in model.network.named_parameters() if id(p) in matrices}
    assert names and all(before[n].ndim == 2 and "blocks." in n for n in names)
    for name, now in with_lora(model, 0.05, seed=1).network.state_dict().items():
        change = float((now - before[name]).norm() / before[name].norm())
        assert change == pytest.approx(0.05 if name in names else 0.0, abs=1e-5), name


@every_family
def test_training_starts_at_the_targets_variance_and_goes_down(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(train, "LOG_EVERY", 1)
    recipe = Recipe(steps=16, batch=2, warmup=2, rate=5e-3)
    train.train(recipe, TINY[name], tmp_path, tmp_path / "weights.safetensors")
    losses = curve.read_losses(tmp_path / "loss.jsonl")
    assert list(losses) == list(range(16))
    share = []  # of the target's variance that is still unexplained
    for step, loss in losses.items():
        clean, _, _, noise = train.batch_at(step, recipe, families.named(name))
        share.append(loss / float((noise - clean).square().mean()))
    assert share[0] == pytest.approx(1, rel=1e-4) and sum(share[12:]) / 4 < 0.97
    assert EmbeddedModel.load(tmp_path / "weights.safetensors").family.name == name
    with Image.open(tmp_path / "loss.png") as plot:
        assert plot.size == (curve.WIDTH, curve.HEIGHT)


def test_a_checkpoint_from_before_the_decay_trains_on_to_another_length(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    short = Recipe(steps=4, batch=2, warmup=1, decay_share=0.5)
    longer = Recipe(steps=8, batch=2, warmup=1, decay_share=0.5)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.train(longer, TINY["wan"], whole, whole / "out.safetensors")
    train.train(short, TINY["wan"], parts, parts / "short.safetensors")
    (parts / "before_decay.safetensors").replace(parts / "checkpoint.safetensors")
    train.train(longer, TINY["wan"], parts, parts / "out.safetensors")
    one = EmbeddedModel.load(whole / "out.safetensors").network.state_dict()
    two = EmbeddedModel.load(parts / "out.safetensors").network.state_dict()
    for key in one:
        torch.testing.assert_close(one[key], two[key], atol=1e-6, rtol=1e-5)


def test_where_a_step_was_run_again_the_plot_shows_the_last_loss(tmp_path):
    log = tmp_path / "loss.jsonl"
    log.write_text(
        '{"step": 20, "loss": 1.0}\n{"step": 0, "loss": 2.0}\n{"step": 20, "loss": 0.5}\n'
    )
    assert curve.read_losses(log) == {0: 2.0, 20: 0.5}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_has_its_bundled_model(name):
    family = families.named(name)
    model = EmbeddedModel.load(family.path)
    assert model.family is family and model.config == family.config()


@every_family
def test_every_family_has_its_workflow(name):
    """Its model, and a latent of the shape that model has."""
    suffix = "" if name == "wan" else f"_{name}"
    file = Path(__file__).parents[2] / "workflows" / f"carnator_demo{suffix}.json"
    workflow = json.loads(file.read_text(encoding="utf-8"))
    nodes = {node["type"]: node for node in workflow["nodes"]}
    loader, latent = nodes["CarnatorLoadDemoModel"], nodes["CarnatorDemoEmptyLatent"]
    assert loader["widgets_values"] == [families.named(name).path.stem, host.SHIFT]
    (slot,) = latent["inputs"]
    links = {link[0]: link for link in workflow["links"]}
    assert links[slot["link"]][1] == loader["id"]
    assert slot["link"] in loader["outputs"][0]["links"]
    assert len(links) == len(workflow["links"]) and max(links) == workflow["last_link_id"]
