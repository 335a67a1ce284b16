"""The embedded host's schedule, noise and samplers are the host's own, number for number."""

from __future__ import annotations

import comfy.model_sampling
import comfy.sample
import comfy.samplers
import pytest
import torch
from comfy.k_diffusion import sampling
from harness import part

embedded = part("carnator.demo.host")


def flow_sampling(shift: float) -> comfy.model_sampling.ModelSamplingDiscreteFlow:
    made = comfy.model_sampling.ModelSamplingDiscreteFlow()
    made.set_parameters(shift=shift, multiplier=1000)
    return made


@pytest.mark.parametrize("shift", [1.0, 5.0, 8.0])
def test_the_simple_schedule_is_the_hosts(shift):
    for steps in (1, 7, 20, 30, 33, 1000):
        theirs = comfy.samplers.simple_scheduler(flow_sampling(shift), steps)
        assert torch.equal(embedded.simple_sigmas(steps, shift), theirs), steps


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
def test_the_noise_of_a_seed_is_the_hosts(seed):
    theirs = comfy.sample.prepare_noise(torch.zeros(embedded.SHAPE), seed)
    assert torch.equal(embedded.seed_noise(seed), theirs)


@pytest.mark.parametrize("name", sorted(embedded.SAMPLERS))
def test_the_samplers_are_the_hosts(name):
    def denoised(x, sigma):
        return torch.tanh(x * (1 - 0.6 * float(sigma)))

    noise, sigmas = embedded.seed_noise(1), embedded.simple_sigmas(12)
    ours = embedded.SAMPLERS[name](denoised, noise, sigmas)
    theirs = getattr(sampling, f"sample_{name}")(
        lambda x, sigma: denoised(x, sigma[0]), noise, sigmas, disable=True
    )
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
