"""The embedded HunyuanVideo transformer: shapes, checkpoints, observation, initial weights."""

from __future__ import annotations

import pytest
import torch

from carnator.demo import captions
from carnator.demo.hunyuan import (
    POOLED_DIM,
    HunyuanConfig,
    HunyuanTransformer,
    pooled_text,
)
from carnator.demo.hunyuan_layers import rotary_table
from carnator.demo.wan import WanConfig, WanTransformer

SMALL = HunyuanConfig(double_blocks=1, single_blocks=2, text_dim=6, channels=3, patch=(2, 2, 1))


@pytest.fixture(scope="module")
def network() -> HunyuanTransformer:
    """A small network whose output depends on everything that goes in."""
    made = HunyuanTransformer(SMALL).requires_grad_(False)
    made.initialise(0)
    generator = torch.Generator().manual_seed(1)
    for name, p in made.named_parameters():
        if "mod" in name or name.startswith("final_layer"):
            p.normal_(0, 0.1, generator=generator)
    return made


def inputs(seed: int = 0, text_tokens: int = 5) -> tuple[torch.Tensor, ...]:
    """Two latents of a grid of 2 x 3 x 4 patches of the small network, with sigmas and text."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 4, 6, 4, generator=generator)
    return x, torch.tensor([0.9, 0.3]), torch.randn(2, text_tokens, 6, generator=generator)


def test_the_velocity_has_the_shape_of_the_latent_and_hangs_on_every_input(network):
    x, sigma, text = inputs()
    out = network(x, sigma, text)
    assert out.shape == x.shape and bool(out.isfinite().all())
    assert not torch.allclose(out, network(x, sigma + 0.05, text))
    assert not torch.allclose(out, network(x, sigma, text.flip(0)))
    assert not torch.allclose(out, network(x, sigma, text[:, :3]))
    for i in range(2):  # and each latent of a batch on its own inputs alone
        alone = network(x[i : i + 1], sigma[i : i + 1], text[i : i + 1])
        torch.testing.assert_close(alone, out[i : i + 1], atol=1e-5, rtol=1e-5)


def test_a_patch_comes_out_where_it_went_in(network):
    """With all blocks shut, a latent changed in one patch gives a velocity changed there only."""
    shut = HunyuanTransformer(SMALL).requires_grad_(False)
    shut.load_state_dict(network.state_dict())
    for name, p in shut.named_parameters():
        if "_mod." in name or ".modulation." in name:
            p.zero_()
    x, sigma, text = inputs()
    changed = x.clone()
    changed[:, :, 2:4, 4:6, 3:4] += 1
    differs = (shut(changed, sigma, text) - shut(x, sigma, text)).abs() > 1e-6
    expected = torch.zeros_like(differs)
    expected[:, :, 2:4, 4:6, 3:4] = True
    assert torch.equal(differs, expected)


def test_text_stays_unrotated_and_each_axis_turns_its_own_share():
    cos, sin = rotary_table(3, (2, 2, 2))
    assert cos.shape == (3 + 8, 64)
    assert bool((cos[:3] == 1).all()) and not sin[:3].any()
    assert not sin[3].any()  # the first patch sits at the origin
    for token, first, last in ((3 + 4, 0, 8), (3 + 2, 8, 36), (3 + 1, 36, 64)):
        turned = sin[token] != 0
        assert bool(turned[first:last].all()) and int(turned.sum()) == last - first
    assert float(sin[3 + 2, 8 + 7]) == pytest.approx(torch.tensor(256.0**-0.25).sin().item())


def test_a_table_made_in_inference_mode_serves_training():
    rotary_table.cache_clear()
    made = HunyuanTransformer(SMALL)
    x, sigma, text = inputs()
    with torch.inference_mode():
        made(x, sigma, text)
    made(x, sigma, text).square().mean().backward()
    assert made.img_in["proj"].weight.grad is not None


def test_the_pooled_vector_is_the_mean_of_the_tokens_padded_with_zeros():
    text = captions.embed(captions.parse("red circle left on gray"))[None]
    pooled = pooled_text(text)
    assert pooled.shape == (1, POOLED_DIM)
    torch.testing.assert_close(pooled[0, : captions.TEXT_DIM], text[0].mean(0))
    assert not pooled[:, captions.TEXT_DIM :].any()


def test_observation_sees_every_joint_attention_in_order(network):
    seen = []
    x, sigma, text = inputs()
    watched = network(x, sigma, text, lambda *layer: seen.append(layer))
    assert torch.equal(watched, network(x, sigma, text))
    assert [layer for layer, *_ in seen] == [0, 1, 2]
    tokens = 5 + 2 * 3 * 4
    for _, q, k, v, out in seen:
        assert q.shape == k.shape == v.shape == (2, 1, tokens, 128)
        assert out.shape == (2, tokens, 128)
        weights = (q @ k.transpose(-1, -2) / 128**0.5).softmax(-1)
        expected = (weights @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [SMALL, HunyuanConfig(), HunyuanConfig(hidden=256)])
def test_a_config_survives_its_checkpoint(config):
    state = HunyuanTransformer(config).state_dict()
    assert HunyuanConfig.from_checkpoint(state, {}) == config


def test_a_foreign_checkpoint_is_refused():
    state = HunyuanTransformer(SMALL).state_dict()
    wan = WanTransformer(WanConfig(dim=24, ffn_dim=24, num_heads=2, num_layers=1)).state_dict()
    flat = torch.zeros(128, 3, 2, 2)  # the image model's patches
    narrow = torch.zeros(128, 512)
    for foreign in (
        wan,
        {},
        {**state, "guidance_in.in_layer.weight": torch.zeros(128, 256)},
        {k: v for k, v in state.items() if not k.startswith("vector_in")},
        {k: v for k, v in state.items() if k != "img_in.proj.weight"},
        {**state, "img_in.proj.weight": flat},
        {**state, "vector_in.in_layer.weight": narrow},
        {**state, "img_in.proj.weight": state["img_in.proj.weight"][:100]},
    ):
        with pytest.raises((KeyError, ValueError)):
            HunyuanConfig.from_checkpoint(foreign, {})


@pytest.mark.parametrize("sizes", [{"hidden": 0}, {"hidden": 96}, {"text_dim": 769}])
def test_sizes_the_host_cannot_take_are_refused(sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes))} must be"):
        HunyuanConfig(**sizes)


def test_training_starts_at_zero_velocity_from_the_seed_alone():
    """A velocity of zero makes the first loss the variance of the target."""
    one, again, other = (HunyuanTransformer(HunyuanConfig()) for _ in range(3))
    for made, seed in ((one, 0), (again, 0), (other, 1)):
        made.initialise(seed)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in one.state_dict().items())
    name = "double_blocks.0.img_attn.qkv.weight"
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
    x = torch.randn(1, 16, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    text = captions.embed(None)[None]
    velocity = one(x, torch.tensor([0.5]), text)
    assert not velocity.any()
    # Yet the first step moves the output, and the second everything behind it.
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    for first in (True, False):
        one.zero_grad()
        (one(x, torch.tensor([0.5]), text) - target).square().mean().backward()
        still = {k for k, p in one.named_parameters() if p.grad is None or not p.grad.any()}
        if first:
            assert "final_layer.linear.weight" not in still and name in still
            with torch.no_grad():
                final = one.final_layer.linear
                assert final.weight.grad is not None
                final.weight -= final.weight.grad
    assert not still


def test_muon_gets_the_matrices_of_the_blocks_without_their_modulation():
    made = HunyuanTransformer(SMALL)
    names = {id(p): name for name, p in made.named_parameters()}
    chosen = {names[id(p)] for p in made.matrices()}
    assert "double_blocks.0.txt_attn.qkv.weight" in chosen
    assert "single_blocks.1.linear2.weight" in chosen
    assert "txt_in.individual_token_refiner.blocks.1.mlp.2.weight" in chosen
    assert not any("mod" in name or "embedder" in name for name in chosen)
    assert len(chosen) == 1 * 8 + 2 * 2 + 2 * 4
