"""A session that used Carnator and took it out is a session that never had it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from harness import HOST
from safetensors.torch import load_file
from sampling import CAPTION, TWEAK, flush, sample
from trial import attach, held

ALONE = """
import sys
sys.argv = ["main.py", "--cpu", "--use-pytorch-cross-attention"]
sys.path.insert(0, {host!r})
import comfy.options
comfy.options.enable_args_parsing()
import comfy.cli_args
import torch
torch.set_flush_denormal(True)
import comfy.model_sampling, comfy.sample, comfy.sd
from safetensors.torch import load_file, save_file
given = load_file({given!r})
model = comfy.sd.load_diffusion_model({model!r})
sampling = model.get_model_object("model_sampling")
sampling.set_parameters(shift=5.0, multiplier=sampling.multiplier)
latent = torch.zeros(1, 16, 4, 8, 8)
with torch.inference_mode():
    noise = comfy.sample.prepare_noise(latent, 7)
    made = {{
        words: comfy.sample.sample(
            model, noise, 8, 2.5, sampler, "simple", [[given[words], {{}}]],
            [[given["negative"], {{}}]], latent, seed=7, disable_pbar=True,
        )
        for words, sampler in (("first", "euler"), ("second", "heun"))
    }}
save_file(made, {out!r})
assert not [name for name in sys.modules if "carnator" in name]
"""


ANOTHER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import conftest
import torch
from harness import part
from sampling import flush, last_report, sample
from trial import attach
store = part("nodes.host").StoreChoice(Path({store!r}), 2**30)
with torch.inference_mode():
    ours = attach(conftest.load(Path({model!r})), store)
    for words in {words!r}:
        sample(ours, words)
        flush(store)
        print("decided:", last_report().decision)
"""


def in_another_process(store: Any, model: Path, *words: str) -> list[str]:
    """Carnator's decisions on some runs that another process makes on the same store."""
    given = {"tests": str(Path(__file__).parent), "store": str(store.folder), "model": str(model)}
    code = ANOTHER.format(**given, words=words)
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return [line.split()[1] for line in made.stdout.splitlines() if line.startswith("decided:")]


def alone(tmp_path: Path, model: Path) -> dict[str, torch.Tensor]:
    """Two runs in a process of their own, in which nothing of Carnator was ever loaded."""
    from safetensors.torch import save_file
    from sampling import caption

    words = {"first": CAPTION, "second": TWEAK, "negative": ""}
    given, out = tmp_path / "given.safetensors", tmp_path / "out.safetensors"
    save_file({name: caption(text)[0][0] for name, text in words.items()}, given)
    code = ALONE.format(host=str(HOST), given=str(given), model=str(model), out=str(out))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)
    return load_file(out)


def test_run_remove_run_equals_a_fresh_process(small_file, small_model, store, tmp_path):
    expected = alone(tmp_path, small_file)
    ours = attach(small_model, store)
    for words in (CAPTION, TWEAK, CAPTION):
        sample(ours, words)
        flush(store)
    assert torch.equal(sample(small_model, CAPTION), expected["first"])
    assert torch.equal(sample(small_model, TWEAK, sampler="heun"), expected["second"])


def test_two_processes_on_one_store(small_file, small_model, store):
    """Each serves what the other has recorded, while both have the store open."""
    ours = attach(small_model, store)
    assert held(sample, small_model, ours, CAPTION).decision == "miss"
    flush(store)
    other = "blue square up on gray"
    assert in_another_process(store, small_file, CAPTION, other) == ["exact", "miss"]
    assert held(sample, small_model, ours, other).decision == "exact"
    assert held(sample, small_model, ours, TWEAK).decision == "hit"
