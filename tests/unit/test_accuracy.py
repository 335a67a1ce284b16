"""The check of a backbone against held-out captions, and the commands for every backbone."""

from __future__ import annotations

import json
import random

import pytest
import torch

from carnator.cli import main
from carnator.demo import accuracy, clips, families, host, quality
from carnator.demo.hunyuan import HunyuanConfig
from carnator.demo.ltx import LTXConfig
from carnator.demo.model import EmbeddedModel
from carnator.demo.train import save_model

TINY = LTXConfig(dim=24, num_heads=2, num_layers=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    network = families.LTX.network(TINY)
    network.initialise(0)
    torch.nn.init.normal_(network.proj_out.weight, std=0.05)
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    save_model(path, network.state_dict(), TINY)
    return path


def test_the_captions_were_never_trained_on_and_differ():
    found = accuracy.held_out_captions(200)
    assert len(set(found)) == 200 and all(c.held_out for c in found)
    assert found[:50] == accuracy.held_out_captions(50)
    assert found != accuracy.held_out_captions(200, seed=1)


def test_a_batch_makes_the_clips_that_single_runs_make(checkpoint):
    model = EmbeddedModel.load(checkpoint)
    what = accuracy.held_out_captions(3)
    made = accuracy.dense_clips(model, what, [5, 6, 7], cfg=3.0, steps=4)
    for i, caption in enumerate(what):
        one = host.generate(model, caption, seed=5 + i, cfg=3.0, steps=4)
        torch.testing.assert_close(made[i], one.clip, atol=1e-4, rtol=1e-4)


def test_the_measure_is_the_share_of_right_attributes(checkpoint, monkeypatch):
    """With clips that are rendered, but for one of them, instead of made by the model."""
    model, rng = EmbeddedModel.load(checkpoint), random.Random(0)
    asked = accuracy.held_out_captions(25)

    def rendered(model, what, seeds, **_):
        return torch.stack(
            [
                torch.zeros(3, 4, 32, 32) if seed == 3 else clips.render(caption, rng)
                for caption, seed in zip(what, seeds, strict=True)
            ]
        )

    monkeypatch.setattr(accuracy, "dense_clips", rendered)
    found = accuracy.measure(model, 25)
    failed = quality.attributes_right(torch.zeros(3, 4, 32, 32), asked[3])
    assert (24 + failed) / 25 - 0.05 < found["attributes_right"] <= (24 + failed) / 25
    assert 0.8 < found["all_right"] <= 24 / 25
    assert found["backbone"] == "ltx" and found["captions"] == 25
    assert set(found["by_attribute"]) == {"background", "color", "motion", "shape"}
    assert found["by_attribute"]["color"] < 1


def test_the_command_tells_and_writes_what_was_measured(checkpoint, tmp_path, capsys):
    out = tmp_path / "deep" / "check.json"
    arguments = ["demo", "check", "--model", str(checkpoint), "--captions", "2"]
    assert main([*arguments, "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data == accuracy.measure(EmbeddedModel.load(checkpoint), 2)
    assert f"{data['attributes_right']:.1%}" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_training_takes_the_backbone_its_length_and_its_decay(name, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("carnator.demo.train.train", lambda *given: asked.append(given))
    monkeypatch.chdir(tmp_path)
    family = families.named(name)
    assert main(["demo", "train", "--backbone", name]) == 0
    assert main(["demo", "train", "--backbone", name, "--steps", "9", "--decay", "0.5"]) == 0
    (recipe, config, folder, out), (other, *_) = asked
    assert (recipe, config) == (family.recipe, family.config())
    assert folder.parts == ("training", name) and out == folder / family.path.name
    assert (other.steps, other.restarts, other.decay_share) == (9, (), 0.5)


def test_options_given_before_the_command_hold(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("carnator.demo.train.train", lambda *given: asked.append(given))
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--backbone", "hunyuan", "train"]) == 0
    assert asked[0][1] == HunyuanConfig()
    with pytest.raises(SystemExit):
        main(["demo", "train", "--decay", "0"])


def test_the_session_plays_on_any_backbone(checkpoint, tmp_path, capsys):
    arguments = ["demo", "--quick", "--steps", "6", "--model", str(checkpoint)]
    assert main([*arguments, "--out", str(tmp_path), "--store", str(tmp_path / "store")]) == 0
    assert "unrelated prompt" in capsys.readouterr().out
