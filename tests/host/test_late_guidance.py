"""Guidance that comes and goes during a run, held against the floor wherever the switch is."""

from __future__ import annotations

import pytest
import torch
from sampling import sample
from trial import attach, tried

HIT = ["miss", "hit", "exact"]


@pytest.mark.parametrize("window", [(0.0, 0.2), (0.2, 0.6), (0.5, 1.0)])
def test_skipped_layers_in_a_part_of_the_run(registry, small_model, store, window):
    start, end = window
    plain = registry["SkipLayerGuidanceDiT"].execute(
        small_model, 1.0, start, end, double_layers="0", single_layers="", rescaling_scale=0
    )[0]

    def run(model, words):
        return sample(model, words, steps=16)

    assert tried(plain, attach(plain, store), store, run) == HIT


def test_an_operation_on_the_guidance(registry, small_model, store):
    made = registry["LatentOperationTonemapReinhard"].execute(1.0)[0]
    plain = registry["LatentApplyOperationCFG"].execute(small_model, made)[0]
    assert tried(plain, attach(plain, store), store) == HIT


def test_three_at_once(registry, small_model, store):
    plain = registry["CFGZeroStar"].execute(small_model)[0]
    plain = registry["NAGuidance"].execute(plain, 2.0, 0.5, 1.5)[0]
    plain = registry["SkipLayerGuidanceDiT"].execute(
        plain, 0.5, 0.0, 1.0, double_layers="1", single_layers="", rescaling_scale=0
    )[0]
    assert tried(plain, attach(plain, store), store) == HIT


def test_a_function_that_counts_its_calls(small_model, store):
    """State that a function keeps for itself is none of its settings: the second run finds the
    first one's record."""

    def made():
        calls = 0

        def counts(args: dict) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return args["denoised"] * 0.95

        return counts

    plain, ours = small_model.clone(), small_model.clone()
    plain.set_model_sampler_post_cfg_function(made())
    ours.set_model_sampler_post_cfg_function(made())
    assert tried(plain, attach(ours, store), store) == HIT


def test_functions_that_differ_in_what_they_were_given(small_model, store):
    def model(factor: float):
        def scales(args: dict) -> torch.Tensor:
            return args["denoised"] * factor

        made = small_model.clone()
        made.set_model_sampler_post_cfg_function(scales)
        return made

    one, other = model(0.95), model(0.9)
    assert tried(one, attach(one, store), store)[0] == "miss"
    assert tried(other, attach(other, store), store)[0] == "miss"
