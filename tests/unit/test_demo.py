"""The embedded backbone's captions, clips and their check, and the host's schedule and samplers."""

from __future__ import annotations

import random

import gaussian
import pytest
import torch

from carnator.demo import captions, clips, host, quality

CAPTION = captions.parse("red circle left on gray")


# Captions and clips.


def test_a_caption_survives_printing_and_parsing():
    rng = random.Random(0)
    for _ in range(50):
        caption = captions.random_caption(rng)
        assert captions.parse(str(caption)) == caption
    assert captions.parse("A red circle moving left, on the gray") == CAPTION


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "must end in 'on'"),
        ("red circle left", "must end in 'on'"),
        ("pink circle left on gray", "'pink' where a colour"),
        ("red blob left on gray", "'blob' where a shape"),
        ("red circle on gray", "nothing where a motion"),
        ("red circle left on pink", "background 'pink'"),
        ("red circle left blue square up on gray", "needs 'and'"),
        ("red circle left and on gray", "nothing after 'and'"),
        ("red circle left and red square up on gray", "two of different colour"),
    ],
)
def test_a_wrong_caption_is_named(text, word):
    with pytest.raises(ValueError, match=word):
        captions.parse(text)


@pytest.mark.parametrize("kind", ["color", "shape", "motion", "background"])
def test_a_tweak_changes_one_word(kind):
    rng = random.Random(kind)
    for _ in range(30):
        before = captions.random_caption(rng)
        after = captions.tweak(before, kind, rng)
        assert sum(a != b for a, b in zip(before.words(), after.words(), strict=True)) == 1


def test_texts_of_different_captions_differ_and_the_empty_one_is_shared():
    a, b = captions.embed(CAPTION), captions.embed(captions.parse("red circle right on gray"))
    assert a.shape == (captions.TEXT_TOKENS, captions.TEXT_DIM)
    assert [i for i in range(len(a)) if not torch.equal(a[i], b[i])] == [2]
    assert torch.equal(captions.embed(None)[5:], a[5:])


def test_clips_fold_into_latents_and_back():
    clip = clips.render(CAPTION, random.Random(1))
    latent = clips.to_latent(clip)
    assert latent.shape == host.SHAPE[1:]
    assert torch.equal(clips.to_clip(latent), clip)
    assert not latent[clips.LIVE_CHANNELS :].any()
    # A shift of one pixel to the right is another channel, not another place.
    assert not torch.equal(clips.to_latent(clip.roll(1, -1)), latent)


def test_the_check_passes_what_was_rendered():
    rng = random.Random(2)
    for _ in range(40):
        caption = captions.random_caption(rng, count=1)
        assert quality.attributes_right(clips.render(caption, rng), caption) == 1.0
    pairs = [captions.random_caption(rng, count=2) for _ in range(40)]
    right = [quality.attributes_right(clips.render(c, rng), c) for c in pairs]
    assert sum(right) / len(right) > 0.95  # things that meet may hide each other


@pytest.mark.parametrize("kind", ["color", "shape", "motion", "background"])
def test_the_check_fails_a_clip_of_another_caption(kind):
    rng = random.Random(3)
    wrong = "background" if kind == "background" else f"{kind} 0"
    for _ in range(20):
        caption = captions.random_caption(rng, count=1)
        other = captions.tweak(caption, kind, rng)
        result = quality.check(clips.render(other, rng), caption)
        assert not result[wrong]
        if kind != "color":  # a thing that is not there has no shape and no motion either
            assert [name for name, ok in result.items() if not ok] == [wrong]


def test_the_check_fails_noise_and_emptiness():
    empty = quality.check(torch.zeros(3, 4, 32, 32), CAPTION)
    assert [name for name, ok in empty.items() if ok] == ["background"]
    right = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        right.append(
            quality.attributes_right(torch.randn(3, 4, 32, 32, generator=generator), CAPTION)
        )
    assert sum(right) / len(right) < 0.3 and max(right) < 0.5


# Schedule and samplers.


def test_the_simple_schedule_falls_from_one_to_zero():
    for steps in (1, 7, 30, 1000):
        sigmas = host.simple_sigmas(steps, 5.0)
        assert len(sigmas) == steps + 1 and sigmas[0] == 1 and sigmas[-1] == 0
        assert bool((sigmas.diff() < 0).all())
    assert float(host.simple_sigmas(2, 5.0)[1]) == pytest.approx(5 * 0.5 / 3)
    assert host.simple_sigmas(4, 1.0).tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize(("steps", "shift"), [(0, 5.0), (1001, 5.0), (10, 0.0), (10, float("nan"))])
def test_an_impossible_schedule_is_refused(steps, shift):
    with pytest.raises(ValueError, match="must be"):
        host.simple_sigmas(steps, shift)


def solution_error(sampler: str, sigmas: torch.Tensor) -> float:
    """RMS distance from the exact solution for data N(m, s^2) and noise n, which at sigma is
    (1 - sigma) m + n sqrt((1 - sigma)^2 s^2 + sigma^2)."""
    mean, noise, spread, end = gaussian.prompt_mean(0), gaussian.noise(0), 0.5, float(sigmas[-1])
    out = host.SAMPLERS[sampler](
        lambda x, sigma: gaussian.denoised(x, sigma, mean, spread), noise, sigmas
    )
    exact = (1 - end) * mean + noise * ((1 - end) ** 2 * spread**2 + end**2) ** 0.5
    return float((out - exact).square().mean().sqrt())


@pytest.mark.parametrize(("sampler", "order"), [("euler", 1), ("heun", 2), ("dpmpp_2m", 2)])
def test_samplers_converge_to_the_exact_solution_at_their_order(sampler, order):
    coarse = solution_error(sampler, torch.linspace(1, 0.2, 21))
    fine = solution_error(sampler, torch.linspace(1, 0.2, 81))
    assert 4 ** (order - 0.2) < coarse / fine < 4 ** (order + 0.2)
    assert solution_error(sampler, host.simple_sigmas(60, 3.0)) < 0.03


@pytest.mark.parametrize("sampler", sorted(host.SAMPLERS))
def test_evaluations_are_counted_as_the_samplers_make_them(sampler):
    asked = []

    def denoise(x, sigma):
        asked.append(sigma)
        return x * 0

    host.SAMPLERS[sampler](denoise, torch.ones(1), host.simple_sigmas(6))
    assert len(asked) == host.evaluation_count(sampler, 6)
