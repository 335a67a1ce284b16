"""Token layouts: what is read off shapes, and what is left alone."""

from __future__ import annotations

import pytest
import torch

from carnator.backbones import TokenLayout, layout_of
from carnator.demo import captions, families

WAN = {
    "head.modulation": (1, 2, 1536),
    "head.head.weight": (64, 1536),
    "patch_embedding.weight": (1536, 16, 1, 2, 2),
    **{f"blocks.{i}.self_attn.q.weight": (1536, 1536) for i in range(30)},
}
LATENT = (1, 16, 21, 60, 104)


def test_the_layout_of_a_published_checkpoint():
    found = layout_of(WAN)
    assert found == TokenLayout("Wan", 16, (1, 2, 2), 12, 128, 30, calls=2)
    assert found.grid(LATENT) == (21, 30, 52)
    assert found.grid((1, 16, 21, 61, 104)) == (21, 31, 52)  # padded
    assert [found.layer_of(call) for call in (0, 1, 2, 59, 60)] == [0, None, 1, None, None]


@pytest.mark.parametrize(
    "extra",
    ["vace_patch_embedding.weight", "audio_proj.audio_proj_glob_1.layer.bias", "face_adapter.x"],
)
def test_variants_with_other_attention_have_none(extra):
    assert layout_of({**WAN, extra: (1,)}) is None


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"double_blocks.0.img_attn.qkv.weight": (9216, 3072), "img_in.weight": (3072, 64)},  # Flux
        {"head.modulation": (1, 2, 1536)},  # a namesake
        {"t5_yproj.weight": (1536, 4096), "pos_frequencies": (3, 24)},
        {"txt_in.individual_token_refiner.blocks.0.norm1.weight": (1,), "img_in.proj.weight": (1,)},
    ],
)
def test_an_unknown_family_has_none(shapes):
    assert layout_of(shapes) is None


def test_where_the_video_tokens_stand():
    tokens = 21 * 30 * 52
    alone = TokenLayout("x", 16, (1, 2, 2), 1, 128, 2)
    assert alone.video_tokens(tokens, LATENT) == slice(0, tokens)
    assert alone.video_tokens(tokens + 1, LATENT) is None
    first = TokenLayout("x", 16, (1, 2, 2), 1, 128, 2, text="first", before=2)
    assert first.video_tokens(tokens + 7, LATENT) == slice(7, tokens + 7)
    assert first.video_tokens(tokens - 1, LATENT) is None
    assert [first.layer_of(call) for call in range(5)] == [None, None, 0, 1, None]
    last = TokenLayout("x", 16, (1, 2, 2), 1, 128, 2, text="last")
    assert last.video_tokens(tokens + 7, LATENT) == slice(0, tokens)


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_the_embedded_backbones_show_what_their_layout_says(name):
    family = families.named(name)
    network = family.network(family.config()).eval()
    shapes = {k: tuple(p.shape) for k, p in network.named_parameters()}
    layout = layout_of(shapes, getattr(network.config, "num_heads", None))
    assert layout is not None and layout.channels == family.channels
    seen = {}

    def observe(layer, q, k, v, out):
        assert q.shape == k.shape == v.shape and out.shape[1] == q.shape[2]
        seen[layer] = q.shape[1:]

    x, text = torch.zeros(family.shape), captions.embed(None)[None]
    with torch.no_grad():
        network(x, torch.ones(1), text, observe)
    assert list(seen) == list(range(layout.layers))
    words = captions.TEXT_TOKENS if layout.text == "first" else 0
    frames, rows, columns = layout.grid(family.shape)
    length = words + frames * rows * columns
    assert set(seen.values()) == {(layout.heads, length, layout.head_dim)}
    assert layout.video_tokens(length, family.shape) == slice(words, length)
