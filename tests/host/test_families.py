"""Video families of the host: reuse where the method covers them, dense with a reason elsewhere."""

from __future__ import annotations

from typing import Any

import comfy.sample
import pytest
import tiny
import torch
from sampling import SEED, flush, last_report
from trial import attach, held, same, tried

WORDS, TWEAK = "a red ball rolls left slowly", "a green ball rolls left slowly"
HIT = ["miss", "hit", "exact"]
VIDEO = [name for name, family in tiny.FAMILIES.items() if not family.audio]
SOUND = [name for name, family in tiny.FAMILIES.items() if family.audio]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def model_of(family: str, folder: Any) -> Any:
    try:
        return tiny.load(family, folder)
    except ImportError:
        pytest.skip(f"this host has no {family}")


def sampled(family: str, mask: Any = None) -> Any:
    def run(model: Any, words: str) -> Any:
        latent = tiny.latent(family)
        noise = comfy.sample.prepare_noise(latent, SEED)
        return comfy.sample.sample(
            model, noise, 8, 2.5, "euler", "simple", tiny.text(family, words),
            tiny.text(family, ""), latent, seed=SEED, disable_pbar=True, noise_mask=mask,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("family", VIDEO)
def test_a_family_of_video_models(folder, store, family):
    plain = model_of(family, folder)
    assert tried(plain, attach(plain, store), store, sampled(family), WORDS, TWEAK) == HIT


@pytest.mark.parametrize("family", SOUND)
def test_nested_latents_of_sound_and_video_run_dense(folder, store, family):
    plain = model_of(family, folder)
    ours, run = attach(plain, store), sampled(family)
    assert run(plain, WORDS).is_nested
    assert tried(plain, ours, store, run, WORDS, TWEAK) == ["dense"] * 3
    assert "audio and video" in last_report().reason
    assert last_report().evaluations == last_report().dense_evaluations == 8
    assert store.open().entries() == []


def test_nested_latents_with_callbacks_and_masks(folder, store):
    plain = model_of("ltxav", folder)
    ours, run = attach(plain, store), sampled("ltxav", torch.ones(1, 1, 2, 4, 4))
    assert same(run(ours, WORDS), run(plain, WORDS))
    seen: list[Any] = []

    def watched(model: Any) -> None:
        latent = tiny.latent("ltxav")
        comfy.sample.sample(
            model, comfy.sample.prepare_noise(latent, SEED), 4, 2.5, "euler", "simple",
            tiny.text("ltxav", WORDS), tiny.text("ltxav", ""), latent, seed=SEED,
            disable_pbar=True, callback=lambda i, d, x, n: seen.append(d),
        )  # fmt: skip

    watched(plain)
    watched(ours)
    assert len(seen) == 8 and all(type(a) is type(b) for a, b in zip(seen[:4], seen[4:]))


def test_a_report_of_a_nested_latent_is_found(folder, store):
    from harness import part

    plain = model_of("ltxav", folder)
    got = sampled("ltxav")(attach(plain, store), WORDS)
    mine = last_report()
    sampled("ltxav")(attach(plain, store), TWEAK)
    assert part("nodes.reports").find(got) is mine is not last_report()


def test_guidance_of_ltx_video(registry, folder, store):
    node = registry.get("LTXVSpatioTemporalGuidance")
    if node is None:
        pytest.skip("this host has no LTXVSpatioTemporalGuidance")
    model = model_of("ltx", folder)
    given = {
        i.id: i.default for i in node.GET_SCHEMA().inputs if getattr(i, "default", None) is not None
    }
    plain = node.execute(**{**given, "model": model})[0]
    decisions = tried(plain, attach(plain, store), store, sampled("ltx"), WORDS, TWEAK)
    assert decisions[0] == "miss"


def test_image_guides_of_ltx_video_are_apart(folder, store):
    """LTX-Video is shown an image by keyframes in the conditioning and by masked frames."""
    plain = model_of("ltx", folder)
    ours = attach(plain, store)
    mask = torch.ones(1, 1, 2, 4, 4)
    mask[:, :, 0] = 0.2
    one, other = sampled("ltx", mask), sampled("ltx", mask * 0.9)
    assert held(one, plain, ours, WORDS).decision == "miss"
    flush(store)
    assert held(other, plain, ours, WORDS).decision == "miss"
    assert held(one, plain, ours, WORDS).decision == "exact"
