"""Runs in the embedded host, the creator's session, and the command line."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from carnator.cli import main
from carnator.demo import captions, clips, host, session
from carnator.demo.model import EmbeddedModel, with_lora
from carnator.demo.train import save_model
from carnator.demo.wan import WanConfig, WanTransformer
from carnator.request import Settings
from carnator.store import Store

TINY = WanConfig(dim=24, ffn_dim=32, num_heads=2, num_layers=2)
CAPTION = captions.parse("red circle left on gray")
REQUEST_KEYS = {
    "name": str,
    "kind": str,
    "decision": str,
    "reason": str,
    "evaluations": int,
    "dense_evaluations": int,
    "seconds": float,
    "dense_seconds": float,
    "psnr_db": float,
    "attributes_right": float,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    save_model(path, WanTransformer(TINY).state_dict(), TINY)
    return path


@pytest.fixture(scope="module")
def model(checkpoint):
    return EmbeddedModel.load(checkpoint)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store") as opened:
        yield opened


# Models and runs.


def test_a_checkpoint_is_loaded_with_its_own_sizes(model):
    assert model.config == TINY
    assert model.fingerprint == EmbeddedModel(model.network, "again").fingerprint


def test_a_lora_changes_every_block_matrix_and_leaves_the_model_alone(model):
    before = {k: v.clone() for k, v in model.network.state_dict().items()}
    patched = with_lora(model, 0.05, seed=1)
    assert patched.fingerprint != model.fingerprint
    assert patched.architecture == model.architecture
    for name, now in patched.network.state_dict().items():
        change = float((now - before[name]).norm() / before[name].norm().clamp_min(1e-9))
        block_matrix = name.startswith("blocks.") and now.ndim == 2
        assert change == pytest.approx(0.05 if block_matrix else 0.0, abs=1e-5), name
        assert torch.equal(model.network.state_dict()[name], before[name])


def test_wrong_checkpoints_are_refused(tmp_path, checkpoint):
    with pytest.raises(FileNotFoundError, match="demo train"):
        EmbeddedModel.load(tmp_path / "nowhere.safetensors")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a checkpoint of a demo backbone"):
        EmbeddedModel.load(broken)


def test_both_branches_in_one_call_equal_two_calls(model):
    x, cond, uncond = host.seed_noise(1), captions.embed(CAPTION)[None], captions.embed(None)[None]
    with torch.no_grad():
        positive, negative = model.branches(x, 0.7, cond, uncond)
        alone, none = model.branches(x, 0.7, cond)
        unguided, _ = model.branches(x, 0.7, uncond)
    assert none is None
    torch.testing.assert_close(positive, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(negative, unguided, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(positive, negative, atol=1e-4)


@pytest.mark.parametrize("sampler", sorted(host.SAMPLERS))
@pytest.mark.parametrize("cfg", [1.0, 2.5])
def test_a_miss_leaves_the_result_untouched(model, store, sampler, cfg):
    fields = {"seed": 3, "steps": 6, "sampler": sampler, "cfg": cfg}
    plain = host.generate(model, CAPTION, **fields)
    watched = host.generate(model, CAPTION, **fields, settings=Settings(), store=store)
    assert watched.report.decision == "miss"
    assert torch.equal(plain.latent, watched.latent)
    assert plain.calls == watched.calls == host.evaluation_count(sampler, 6)


def test_a_repeated_request_is_an_exact_hit_and_a_changed_lora_is_not(model, store):
    fields = {"seed": 3, "steps": 6, "settings": Settings(), "store": store}
    first = host.generate(model, CAPTION, **fields)
    store.flush()
    again = host.generate(model, CAPTION, **fields)
    assert again.report.decision == "exact" and again.calls == 1
    assert torch.equal(first.latent, again.latent)
    patched = host.generate(with_lora(model, 0.05), CAPTION, **fields)
    assert patched.report.decision != "exact"


def test_an_interrupted_run_is_not_recorded(model, store):
    calls = 0

    def interrupt(_):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    fields = {"seed": 3, "steps": 6, "settings": Settings(), "store": store}
    with pytest.raises(KeyboardInterrupt):
        host.generate(model, CAPTION, **fields, progress=interrupt)
    store.flush()
    assert store.entries() == []


def test_bank_noise_is_shared_between_seeds_but_never_gives_two_seeds_one_clip(model, store):
    other_seed = session.same_bank_seed(3)
    fields = {"steps": 6, "settings": Settings(noise_policy="bank"), "store": store}
    first = host.generate(model, CAPTION, seed=3, **fields)
    store.flush()
    another = captions.parse("red circle right on gray")
    shared = host.generate(model, another, seed=other_seed, **fields)
    own = host.generate(model, CAPTION, seed=other_seed, **fields)
    assert torch.equal(shared.noise, first.noise)
    assert torch.equal(own.noise, host.seed_noise(other_seed))
    assert not torch.equal(first.noise, host.seed_noise(3))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"sampler": "lcm"}, "Unknown sampler 'lcm'"),
        ({"cfg": float("nan")}, "CFG must be"),
        ({"seed": -1}, "seed must be"),
        ({"steps": 0}, "Steps must be"),
    ],
)
def test_impossible_requests_are_refused(model, fields, word):
    with pytest.raises(ValueError, match=word):
        host.generate(model, CAPTION, **fields)


# The session and the command line.


def test_the_session_covers_every_kind_of_change():
    wishes = session.wishes()
    assert {w.kind for w in wishes} == set(session.KINDS)
    assert sum(w.kind == "word" for w in wishes) >= 4
    assert len({w.name for w in wishes}) == len(wishes)
    assert {w.kind for w in session.wishes(quick=True)} == set(session.KINDS)
    for wish in wishes:
        captions.parse(wish.prompt)
        if wish.kind == "word":
            assert (wish.seed, wish.cfg, wish.steps) == (wishes[0].seed, host.CFG, host.STEPS)


def test_the_demo_writes_its_table_data_and_pictures(checkpoint, tmp_path, capsys):
    out, data_file = tmp_path / "out", tmp_path / "deep" / "demo.json"
    folder = str(tmp_path / "kept")
    arguments = ["demo", "--quick", "--steps", "6", "--model", str(checkpoint)]
    arguments += ["--out", str(out), "--json", str(data_file), "--store", folder]
    assert main(arguments) == 0
    data = json.loads(data_file.read_text())
    assert set(data) == {"requests", "summary"}
    for request in data["requests"]:
        assert {k: type(v) for k, v in request.items()} == REQUEST_KEYS
        assert request["kind"] in session.KINDS
        assert request["decision"] in ("dense", "miss", "hit", "exact")
        assert 1 <= request["evaluations"] <= request["dense_evaluations"]
        assert 0 <= request["attributes_right"] <= 1
        if request["decision"] in ("dense", "miss"):
            assert request["evaluations"] == request["dense_evaluations"]
            assert request["psnr_db"] > 100
    assert data["requests"][0]["decision"] == "dense"
    assert [r["decision"] for r in data["requests"] if r["kind"] == "seed_keep"] == ["miss"]
    printed = capsys.readouterr().out
    assert all(request["name"] in printed for request in data["requests"])
    with Image.open(out / "sheet.png") as sheet, Image.open(out / "session.gif") as film:
        assert sheet.height > 96 * len(data["requests"])
        assert film.n_frames == clips.FRAMES
    dense = sum(r["decision"] in ("dense", "miss") for r in data["requests"])
    assert main(["store", "stat", "--store", folder]) == 0
    assert f"{dense} records" in capsys.readouterr().out
    assert main(["store", "list", "--store", folder]) == 0
    assert session.FIRST in capsys.readouterr().out
    assert main(["store", "clear", "--yes", "--store", folder]) == 0
    assert "records deleted" in capsys.readouterr().out


def test_training_gets_what_the_command_line_says(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("carnator.demo.train.train", lambda *given: asked.append(given))
    folder = tmp_path / "work"
    assert main(["demo", "train", "--steps", "5", "--folder", str(folder)]) == 0
    recipe, config, place, out = asked[0]
    assert (recipe.steps, config, place) == (5, WanConfig(), folder)
    assert out.parent == folder and str(out) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["demo", "--steps", "2"], "'2' is not a whole number from 6"),
        (["demo", "--cfg", "much"], "'much' is not a number"),
        (["demo", "--preset", "best"], "invalid choice: 'best'"),
        (["demo", "--seed", "-1"], "'-1' is not a whole number"),
        (["demo", "train", "--backbone", "sora"], "invalid choice: 'sora'"),
        (["store", "stat"], "--store"),
        ([], "COMMAND"),
    ],
)
def test_mistyped_options_are_named(arguments, word, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert word in capsys.readouterr().err


def test_missing_files_are_named(tmp_path, checkpoint, capsys):
    missing, file = tmp_path / "nowhere", tmp_path / "file"
    file.write_text("")
    assert main(["demo", "--model", str(missing)]) == 2
    assert f"There is no model at {missing}" in capsys.readouterr().err
    assert main(["demo", "--model", str(checkpoint), "--out", str(file / "x")]) == 2
    assert "give --out another place" in capsys.readouterr().err
    assert main(["store", "stat", "--store", str(missing)]) == 2
    assert f"There is no store at {missing}" in capsys.readouterr().err
    assert not missing.exists()
