"""What the first evaluation cannot see must not be reused on: parts of a run, late options."""

from __future__ import annotations

import comfy.sample
import pytest
import torch
from harness import part
from sampling import CAPTION, SEED, SMALL, TWEAK, caption, flush, last_report, loose, sample


def attach(model, store):
    return part("nodes.host").attach(model, loose(), store)


def ranged(first, then, switch=0.4):
    """Two prompts, one after the other."""
    (early,), (late,) = caption(first), caption(then)
    return [
        [early[0], {"start_percent": 0.0, "end_percent": switch}],
        [late[0], {"start_percent": switch, "end_percent": 1.0}],
    ]


def run(model, positive):
    latent = torch.zeros(SMALL)
    noise = comfy.sample.prepare_noise(latent, SEED)
    parts = (positive, caption(""), latent)
    return comfy.sample.sample(
        model, noise, 8, 2.5, "euler", "simple", *parts, seed=SEED, disable_pbar=True
    )


@pytest.mark.parametrize("prompts", [(CAPTION, TWEAK), (TWEAK, CAPTION)])
def test_text_of_a_part_of_the_run_is_not_judged_by_its_start(small_model, store, prompts):
    run(attach(small_model, store), ranged(CAPTION, CAPTION))
    flush(store)
    got = run(attach(small_model, store), ranged(*prompts))
    assert last_report().decision == "miss"
    assert torch.equal(got, run(small_model, ranged(*prompts)))


def late(model, factor):
    """A function after guidance that acts on the later half alone."""
    clone = model.clone()
    clone.set_model_sampler_post_cfg_function(
        lambda args: args["denoised"] * (factor if float(args["sigma"]) < 0.8 else 1.0)
    )
    return clone


def test_other_values_of_an_option_are_not_judged_by_the_start(small_model, store):
    sample(attach(late(small_model, 0.9), store), steps=16)
    flush(store)
    got = sample(attach(late(small_model, 0.5), store), steps=16)
    assert last_report().decision == "miss"
    assert torch.equal(got, sample(late(small_model, 0.5), steps=16))
    sample(attach(late(small_model, 0.9), store), TWEAK, steps=16)
    assert last_report().decision == "hit"


def test_functions_of_other_constants_are_other_functions():
    digest = part("nodes.fingerprint").digest
    functions = [eval(f"lambda x: x * {n}") for n in (2, 3, 2)]  # noqa: S307
    assert digest(functions[0]) == digest(functions[2]) != digest(functions[1])


def test_a_scale_of_zero_is_not_unguided(small_model, store):
    sample(attach(small_model, store), cfg=0.0)
    flush(store)
    (entry,) = store.open().entries()
    assert entry.meta["cfg"] == 0.0
    assert torch.equal(sample(attach(small_model, store), cfg=1.0), sample(small_model, cfg=1.0))


@pytest.mark.parametrize("place", ["observe.Watch._branches", "reports.remember", "host.read_call"])
def test_a_fault_around_an_evaluation_never_costs_the_run(small_model, store, monkeypatch, place):
    module, _, path = place.partition(".")
    owner = part(f"nodes.{module}")
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)

    def broken(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(owner, name, broken)
    assert torch.equal(sample(attach(small_model, store)), sample(small_model))
