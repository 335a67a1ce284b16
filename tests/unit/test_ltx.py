"""The embedded LTX-Video: its sizes from a checkpoint, its start of training, what it shows."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from carnator.demo.ltx import LTXConfig, LTXTransformer, rotary_table
from carnator.demo.wan import WanConfig, WanTransformer

TINY = LTXConfig(dim=40, num_heads=2, num_layers=3, text_dim=24, channels=12, scale=(2, 4, 4))
SHAPE = (2, 12, 3, 4, 5)  # all three axes differ


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator)
    return x, torch.tensor([0.9, 0.2]), torch.randn(2, 7, TINY.text_dim, generator=generator)


def network() -> LTXTransformer:
    made = LTXTransformer(TINY).requires_grad_(False)
    made.initialise(0)
    made.proj_out.weight.normal_(generator=torch.Generator().manual_seed(1))
    return made


def metadata(config: LTXConfig, **options: object) -> dict[str, str]:
    told = config.host_config()
    told["transformer"] |= options
    return {"config": json.dumps(told)}


@pytest.mark.parametrize("config", [TINY, LTXConfig()])
def test_the_config_survives_a_checkpoint(config):
    state = LTXTransformer(config).state_dict()
    assert LTXConfig.from_checkpoint(state, metadata(config)) == config


def test_the_bundled_size_is_small():
    count = sum(p.numel() for p in LTXTransformer(LTXConfig()).parameters())
    assert 2e6 < count < 3e6


def test_the_checkpoint_of_another_family_is_refused():
    wan = WanConfig(dim=24, ffn_dim=24, num_heads=2, num_layers=1)
    with pytest.raises(KeyError):
        LTXConfig.from_checkpoint(
            WanTransformer(wan).state_dict(), {"config": json.dumps(wan.host_config())}
        )
    with pytest.raises(KeyError):
        LTXConfig.from_checkpoint(LTXTransformer(TINY).state_dict(), {})


@pytest.mark.parametrize(
    ("name", "value"), [("causal_temporal_positioning", True), ("rope_type", "split")]
)
def test_an_option_that_would_be_computed_wrongly_is_refused(name, value):
    state = LTXTransformer(TINY).state_dict()
    with pytest.raises(ValueError, match=name):
        LTXConfig.from_checkpoint(state, metadata(TINY, **{name: value}))


def test_an_option_at_its_usual_value_is_accepted():
    usual = {"rope_type": "interleaved", "positional_embedding_max_pos": [20, 2048, 2048]}
    state = LTXTransformer(TINY).state_dict()
    assert LTXConfig.from_checkpoint(state, metadata(TINY, **usual)) == TINY


def test_the_loss_starts_at_the_variance_of_the_target():
    made = LTXTransformer(TINY)
    made.initialise(0)
    x, sigma, text = inputs()
    velocity = made(x, sigma, text)
    assert velocity.shape == SHAPE and not velocity.any()
    velocity.sub(x).square().mean().backward()
    assert made.proj_out.weight.grad.any()


def test_training_starts_from_the_seed_alone():
    one, two, other = LTXTransformer(TINY), LTXTransformer(TINY), LTXTransformer(TINY)
    for made, seed in ((one, 3), (two, 3), (other, 4)):
        made.initialise(seed)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.patchify_proj.weight, other.patchify_proj.weight)


def test_muon_gets_the_weights_of_the_blocks_and_nothing_else():
    made = LTXTransformer(TINY)
    chosen = {id(p) for p in made.matrices()}
    names = {name for name, p in made.named_parameters() if id(p) in chosen}
    assert len(names) == 10 * TINY.num_layers
    assert all(n.startswith("transformer_blocks.") and n.endswith(".weight") for n in names)
    assert not any("norm" in n or "table" in n for n in names)


def test_every_self_attention_is_observed_and_nothing_changes():
    made, seen = network(), []
    x, sigma, text = inputs()
    watched = made(x, sigma, text, lambda *layer: seen.append(layer))
    assert torch.equal(watched, made(x, sigma, text))
    assert [layer for layer, *_ in seen] == list(range(TINY.num_layers))
    for _, q, k, v, out in seen:
        assert q.shape == k.shape == v.shape == (2, TINY.num_heads, 60, 20)
        expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        assert torch.equal(out, expected)


def test_each_sample_depends_on_its_own_latent_noise_level_and_text():
    made = network()
    x, sigma, text = inputs()
    before = made(x, sigma, text)
    for changed in ((x + 1, sigma, text), (x, sigma / 2, text), (x, sigma, -text)):
        assert not torch.allclose(made(*changed), before, atol=1e-3)
        mixed = (torch.stack([a[0], b[1]]) for a, b in zip((x, sigma, text), changed, strict=True))
        after = made(*mixed)
        torch.testing.assert_close(after[0], before[0])
        assert not torch.allclose(after[1], before[1], atol=1e-3)


def test_positions_are_told_apart_and_spare_pairs_stand_still():
    cos, sin = rotary_table((3, 4, 5), TINY.scale, TINY.dim)
    assert cos.shape == sin.shape == (60, 20)
    assert (cos[:, :2] == 1).all() and not sin[:, :2].any()  # 40 / 2 pairs, 3 * 6 of them turn
    angles = torch.cat([cos, sin], dim=-1)
    assert len(angles.unique(dim=0)) == 60
