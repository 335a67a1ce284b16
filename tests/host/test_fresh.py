"""A session that used Carnator and took it out is a session that never had it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from harness import HOST
from safetensors.torch import load_file
from sampling import CAPTION, TWEAK, flush, sample
from trial import attach

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
