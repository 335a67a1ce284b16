"""Training: the schedule of the rate, the batches, and a run that is interrupted and resumed."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from carnator.demo import train
from carnator.demo.wan import WanConfig

TINY = WanConfig(dim=24, ffn_dim=24, num_heads=2, num_layers=1)


def test_the_rate_warms_up_holds_decays_and_restarts():
    recipe = train.Recipe(steps=1000, restarts=(800,), warmup=10, rate=1.0)
    assert recipe.rate_at(0) == 0.1 and recipe.rate_at(300) == 1.0
    assert recipe.rate_at(700) == 0.5 and recipe.rate_at(799) < 0.03
    assert recipe.rate_at(800) == 0.8 and recipe.rate_at(999) < 0.03


def test_a_batch_is_a_function_of_step_and_seed():
    recipe = train.Recipe(batch=2)
    one, again = train.batch_at(5, recipe), train.batch_at(5, recipe)
    other = train.batch_at(6, recipe)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[3], other[3])


def test_orthogonalise_flattens_the_spectrum():
    matrix = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(train.orthogonalise(matrix))
    assert values.min() > 0.5 and values.max() < 1.3


def test_a_resumed_run_equals_an_unbroken_one(tmp_path, monkeypatch):
    """Also: checkpoints hold no pickle, and the model file carries what the host's loader reads."""
    monkeypatch.setattr(torch, "compile", lambda model: model)
    whole = train.Recipe(steps=6, restarts=(4,), batch=2, warmup=2)
    train.train(whole, TINY, tmp_path / "a", tmp_path / "a.safetensors")
    train.train(
        train.Recipe(steps=4, restarts=(), batch=2, warmup=2), TINY, tmp_path / "b", tmp_path / "x"
    )
    train.train(whole, TINY, tmp_path / "b", tmp_path / "b.safetensors")
    one, two = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert one.keys() == two.keys() and "patch_embedding.weight" in one
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=1e-5)
