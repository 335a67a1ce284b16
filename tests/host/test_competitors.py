"""The benchmarks' EasyCache and LazyCache make the decisions of the host's own nodes."""

from __future__ import annotations

import uuid

import pytest
import torch
from comfy.model_sampling import ModelSamplingDiscreteFlow
from comfy_extras import nodes_easycache as shipped

from benchmarks.batch import Batch, embedding
from benchmarks.competitors.easycache import EasyCache
from benchmarks.competitors.lazycache import LazyCache
from carnator.demo import captions, host
from carnator.demo.model import EmbeddedModel

STEPS, CFG, SHIFT = 30, 4.0, 5.0
CAPTION = captions.parse("red circle left on gray")


@pytest.fixture(scope="module")
def model():
    return EmbeddedModel.load()


def prepared(kind, threshold):
    sampling = ModelSamplingDiscreteFlow()
    sampling.set_parameters(shift=SHIFT, multiplier=1000)
    holder = kind(threshold, 0.15, 0.95, 8, False, output_channels=16)
    return holder.prepare_timesteps(sampling)


def sample(denoise):
    with torch.no_grad():
        return host.euler(denoise, host.seed_noise(3), host.simple_sigmas(STEPS, SHIFT))


def with_easycache(model, threshold):
    """A run through the host's wrapper of the network, both branches in one batch as it has them:
    the unconditional one first."""
    holder, made = prepared(shipped.EasyCacheHolder, threshold), []
    names = [uuid.uuid4(), uuid.uuid4()]
    text = torch.stack([embedding(None), embedding(CAPTION)])

    def network(x, t, *rest):
        made.append(float(t[0]))
        return model.network(x, t, text)

    def denoise(x, sigma):
        holder.skip_current_step = False
        levels = torch.full((2,), sigma)
        options = {"easycache": holder, "sigmas": levels[:1], "uuids": names}
        v = shipped.easycache_forward_wrapper(network, torch.cat([x, x]), levels, options)
        negative, positive = (x - sigma * v).chunk(2)
        return negative + CFG * (positive - negative)

    return sample(denoise), made


def with_lazycache(model, threshold):
    """A run through the host's wrapper of the guided prediction."""
    holder, made = prepared(shipped.LazyCacheHolder, threshold), []

    def predict(x, t, options):
        made.append(float(t[0]))
        parts = model.branches(x, float(t[0]), embedding(CAPTION)[None], embedding(None)[None])
        return parts[1] + CFG * (parts[0] - parts[1])

    def denoise(x, sigma):
        options = {"transformer_options": {"easycache": holder}}
        return shipped.lazycache_predict_noise_wrapper(predict, x, torch.full((1,), sigma), options)

    return sample(denoise), made


@pytest.mark.parametrize("threshold", [0.1, 0.2, 0.8])
@pytest.mark.parametrize(
    ("theirs", "ours"), [(with_easycache, EasyCache), (with_lazycache, LazyCache)]
)
def test_the_rule_is_the_hosts(model, theirs, ours, threshold):
    latent, made = theirs(model, threshold)
    rule = ours(Batch.of(model, [CAPTION], [3], [CFG], STEPS, shift=SHIFT), threshold)
    asked = []
    evaluate = rule.evaluate
    rule.evaluate = lambda some, x, sigma: asked.append(sigma) or evaluate(some, x, sigma)
    outcome = rule.outcome()
    assert asked == pytest.approx(made) and len(made) < STEPS
    torch.testing.assert_close(outcome.latents, latent, atol=1e-3, rtol=1e-3)
