"""Models that are shown an image: nothing is reused across a changed one, whatever the words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import comfy.sample
import pytest
import tiny
import torch
from sampling import SEED, flush
from trial import attach, held

WORDS, TWEAK = "a red ball rolls left", "a green ball rolls left"
SHAPE = tiny.FAMILIES["wan"].latent


def picture(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def concat(seed: int) -> dict[str, Any]:
    """What an image-to-video node of Wan adds: the image as latents, and which frames it fills."""
    mask = torch.ones(1, 1, *SHAPE[2:])
    mask[:, :, 0] = 0
    return {"concat_latent_image": picture(seed, *SHAPE), "concat_mask": mask}


def clip_vision(seed: int) -> dict[str, Any]:
    states = picture(seed, 1, 8, 1280)
    return {"clip_vision_output": SimpleNamespace(penultimate_hidden_states=states)}


def reference(seed: int) -> dict[str, Any]:
    return {"reference_latents": [picture(seed, *SHAPE)]}


def masked(seed: int) -> dict[str, Any]:
    """The same image, which fills another part of the clip."""
    given = concat(1)
    if seed != 1:
        given["concat_mask"] = 1 - given["concat_mask"]
    return given


def sampled(family: str, extra: dict[str, Any]) -> Any:
    def run(model: Any, words: str) -> torch.Tensor:
        positive, negative = (
            [[c[0], {**c[1], **extra}] for c in tiny.text(family, w)] for w in (words, "")
        )
        latent = torch.zeros(SHAPE)
        noise = comfy.sample.prepare_noise(latent, SEED)
        return comfy.sample.sample(
            model, noise, 8, 2.5, "euler", "simple", positive, negative, latent,
            seed=SEED, disable_pbar=True,
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    ("family", "image"),
    [
        ("wan_i2v", concat),
        ("wan_i2v", clip_vision),
        ("wan_i2v", masked),
        ("wan_i2v_22", concat),
        ("wan", reference),
    ],
    ids=lambda item: getattr(item, "__name__", item),
)
def test_a_changed_image_is_never_reused_across(folder, store, family, image):
    plain = tiny.load(family, folder)
    ours = attach(plain, store)
    one, other = sampled(family, image(1)), sampled(family, image(2))
    assert held(one, plain, ours, WORDS).decision == "miss"
    flush(store)
    assert held(one, plain, ours, TWEAK).decision == "hit"  # words may change beside an image
    assert held(other, plain, ours, WORDS).decision == "miss"
    flush(store)
    assert held(other, plain, ours, WORDS).decision == "exact"
    assert held(one, plain, ours, WORDS).decision == "exact"
    assert held(sampled(family, {}), plain, ours, WORDS).decision == "miss"  # and without any


def test_a_start_latent_is_an_image_too(small_model, store):
    """Partial denoising, and image to video by a latent that holds the image."""
    from sampling import CAPTION, SMALL, sample
    from sampling import TWEAK as OTHER

    def from_latent(seed: int) -> Any:
        latent = picture(seed, *SMALL)
        return lambda model, words: sample(model, words, latent=latent, steps=8)

    one, other = from_latent(1), from_latent(2)
    ours = attach(small_model, store)
    assert held(one, small_model, ours, CAPTION).decision == "miss"
    flush(store)
    assert held(one, small_model, ours, OTHER).decision == "hit"
    assert held(other, small_model, ours, CAPTION).decision == "miss"


@pytest.mark.parametrize("denoise", [0.75, 0.5])
def test_partial_denoising(small_model, store, denoise):
    from sampling import CAPTION, SMALL, caption
    from sampling import TWEAK as OTHER

    latent = picture(5, *SMALL)

    def run(model: Any, words: str, denoise: float = denoise) -> torch.Tensor:
        noise = comfy.sample.prepare_noise(latent, SEED)
        return comfy.sample.sample(
            model, noise, 8, 2.5, "euler", "simple", caption(words), caption(""), latent,
            denoise=denoise, seed=SEED, disable_pbar=True,
        )  # fmt: skip

    ours = attach(small_model, store)
    assert held(run, small_model, ours, CAPTION).decision == "miss"
    flush(store)
    assert held(run, small_model, ours, OTHER).decision == "hit"
    assert held(run, small_model, ours, CAPTION).decision == "exact"

    def whole(model: Any, words: str) -> torch.Tensor:
        return run(model, words, 1.0)

    assert held(whole, small_model, ours, CAPTION).decision == "miss"  # another start
