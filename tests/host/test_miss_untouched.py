"""A run that finds no donor is bit for bit the run without Carnator."""

from __future__ import annotations

import pytest
import torch
from harness import part
from sampling import Calls, last_report, sample

SAMPLERS = (
    "euler",
    "heun",
    "dpmpp_2m",
    "uni_pc",
    "res_multistep",
    "euler_ancestral",
    "dpmpp_sde",
)


@pytest.mark.parametrize("cfg", [1.0, 2.5])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_miss_is_untouched(small_model, store, sampler, cfg):
    host, settings = part("nodes.host"), part("carnator.request").Settings()
    counted = Calls(small_model)
    expected = sample(counted.model, sampler=sampler, cfg=cfg)
    calls, counted.count = counted.count, 0
    got = sample(host.attach(counted.model, settings, store), sampler=sampler, cfg=cfg)
    assert torch.equal(got, expected)
    report = last_report()
    assert report.decision in ("miss", "dense")
    assert counted.count == calls == report.evaluations == report.dense_evaluations > 0
