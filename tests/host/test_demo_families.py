"""The demo's nodes and its embedded host with every backbone, at random weights."""

from __future__ import annotations

from typing import Any

import comfy.sample
import comfy.samplers
import folder_paths
import pytest
import torch
from conftest import load
from harness import part
from sampling import CAPTION, SEED
from torch import Tensor

families = part("carnator.demo.families")
SIZES: dict[str, dict[str, Any]] = {
    "wan": {"dim": 48, "ffn_dim": 96, "num_heads": 2, "num_layers": 2},
    "hunyuan": {"double_blocks": 1, "single_blocks": 1},
    "ltx": {"dim": 48, "num_heads": 2, "num_layers": 2},
}


@pytest.fixture(scope="module", params=sorted(families.FAMILIES))
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A random model of the family, embedded and as the host loads it."""
    family = families.named(request.param)
    network = family.network(family.config(**SIZES[family.name]))
    network.initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in network.parameters():  # a network whose output is zero shows nothing
            p += 0.05 * torch.randn(p.shape, generator=generator)
    path = tmp_path_factory.mktemp(family.name) / f"{family.name}.safetensors"
    part("carnator.demo.train").save_model(path, network.state_dict(), network.config)
    return part("carnator.demo.model").EmbeddedModel.load(path), load(path)


def sampled(
    model: Any, latent: dict, text: str = CAPTION, steps: int = 6, told: bool = True
) -> Tensor:
    """What a KSampler node gives of the demo nodes' latent and captions. ``told`` says whether
    the captions know their model."""
    demo, named = part("nodes.demo"), model if told else None
    samples = latent["samples"]
    return comfy.sample.sample(
        model,
        comfy.sample.prepare_noise(samples, SEED),
        steps,
        4.0,
        "euler",
        "simple",
        demo.CarnatorDemoCaption.execute(text, named)[0],
        demo.CarnatorDemoCaption.execute("", named)[0],
        samples,
        seed=SEED,
        disable_pbar=True,
    )


def test_one_shift_gives_all_families_the_embedded_hosts_schedule(pair):
    _, theirs = pair
    sampling = theirs.get_model_object("model_sampling")
    for steps in (6, 24, 30):
        host_sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", steps)
        ours = part("carnator.demo.host").simple_sigmas(steps, 5.0)
        torch.testing.assert_close(host_sigmas, ours, atol=1e-6, rtol=1e-6)
    assert float(sampling.timestep(torch.tensor(0.5))) in (0.5, 500.0)


def test_the_demo_nodes_and_the_embedded_host_make_the_same_clip(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))
    ours, theirs = pair
    demo, captions = part("nodes.demo"), part("carnator.demo.captions")
    assert demo.family_of(theirs) is ours.family
    latent = demo.CarnatorDemoEmptyLatent.execute(model=theirs)[0]
    assert tuple(latent["samples"].shape) == ours.family.shape
    made = sampled(theirs, latent)
    result = part("carnator.demo.host").generate(
        ours, captions.parse(CAPTION), seed=SEED, steps=6, cfg=4.0
    )
    inside = part("nodes.host").model_space(theirs, made)
    assert result.latent.std() > 0.1
    assert (inside - result.latent).abs().max() < 1e-3
    frames = demo.CarnatorDemoDecode.execute({"samples": made}, theirs, 1)[0]
    expected = result.clip.permute(1, 2, 3, 0).add(1).div(2)
    assert frames.shape == (4, 32, 32, 3)
    assert (frames - expected).abs().max() < 1e-3
    if ours.family.name != "ltx":  # whose captions must be told their model
        assert torch.equal(sampled(theirs, latent, told=False), made)
    other = sampled(theirs, latent, "cyan square up on black")
    assert (other - made).abs().max() > 1e-3  # the caption, pooled or not, has its effect


def test_clips_of_other_lengths_must_fold(pair):
    ours, theirs = pair
    node = part("nodes.demo").CarnatorDemoEmptyLatent
    assert node.execute(8, theirs)[0]["samples"].shape[2] == 8 // ours.family.fold[0]
    if ours.family.fold[0] > 1:
        with pytest.raises(ValueError, match="3 frames does not fit LTX-Video"):
            node.execute(3, theirs)


def test_a_latent_of_another_family_is_not_decoded(pair):
    ours, theirs = pair
    channels = 16 if ours.family.channels != 16 else 128
    wrong = {"samples": torch.zeros(1, channels, 2, 8, 8)}
    with pytest.raises(ValueError, match=f"is not one of the {ours.family.title} demo model"):
        part("nodes.demo").CarnatorDemoDecode.execute(wrong, theirs, 1)


def test_a_model_that_is_not_the_demos_is_named():
    class Foreign:
        class model:
            diffusion_model = torch.nn.Linear(1, 1)

    with pytest.raises(ValueError, match="not one of the demo's .* Load Demo Model"):
        part("nodes.demo").CarnatorDemoEmptyLatent.execute(4, Foreign())
