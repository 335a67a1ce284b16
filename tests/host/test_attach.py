"""Carnator on a model: once, removable, without memory of its own, in company of other packs."""

from __future__ import annotations

import comfy.model_management
import comfy.patcher_extension as extension
import pytest
import torch
from harness import part
from sampling import SMALL, TWEAK, Calls, flush, last_report, loose, sample

OUTER = extension.WrappersMP.OUTER_SAMPLE


def attach(model, store, settings=None):
    return part("nodes.host").attach(model, settings or loose(), store)


def record(model, store, **kwargs):
    """A first, dense run that later ones can build on."""
    latent = sample(attach(model, store), **kwargs)
    flush(store)
    assert last_report().record == "submitted"
    return latent


def test_a_tweak_is_a_hit_with_fewer_calls(small_model, store):
    ours = Calls(attach(small_model, store))
    record(ours.model, store)
    ours.count = 0
    latent = sample(ours.model, TWEAK)
    report = last_report()
    assert report.decision == "hit", report.reason
    assert ours.count == report.evaluations < report.dense_evaluations == 8
    expected = sample(small_model, TWEAK)
    assert not torch.equal(latent, expected)
    assert (latent - expected).abs().max() < 0.2 * expected.abs().max()


def test_the_same_request_is_an_exact_hit(small_model, store):
    ours = Calls(attach(small_model, store))
    first = record(ours.model, store)
    ours.count = 0
    again = sample(ours.model)
    assert last_report().decision == "exact"
    assert ours.count == 1
    assert torch.equal(again, first)


def test_twice_in_a_chain_is_once(small_model, store, tmp_path):
    other = part("nodes.host").StoreChoice(tmp_path / "other", 2**30)
    twice = attach(attach(small_model, other), store)
    assert len(twice.get_wrappers(OUTER, "carnator")) == 1
    sample(twice)
    flush(store)
    assert len(store.open().entries()) == 1
    assert not other.folder.exists()


def test_switched_off_is_the_model_itself(small_model, store):
    node = part("nodes.accelerate").CarnatorAccelerate
    assert node.execute(small_model, "balanced", "keep", False)[0] is small_model
    on = node.execute(small_model, "balanced", "keep", True, store=store)[0]
    off = node.execute(on, "balanced", "keep", False)[0]
    assert not off.get_wrappers(OUTER, "carnator")
    assert on.get_wrappers(OUTER, "carnator")
    assert not small_model.get_wrappers(OUTER, "carnator")


def test_without_the_node_the_model_is_as_fresh(small_model, store):
    before = sample(small_model)
    record(small_model, store)
    sample(attach(small_model, store), TWEAK)
    assert torch.equal(sample(small_model), before)
    assert "carnator" not in str(small_model.model_options)


def test_state_does_not_outlive_a_run(small_model, store):
    import gc

    engine = part("carnator.engine")
    sample(attach(small_model, store))
    flush(store)
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is engine.Run]


def test_cancel_leaves_no_record_and_the_next_run_is_right(small_model, store):
    def cancel(step, denoised, x, total):
        if step == 4:
            raise comfy.model_management.InterruptProcessingException

    ours = attach(small_model, store)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(ours, callback=cancel)
    flush(store)
    assert store.open().entries() == []
    assert last_report().record.startswith("not recorded")
    assert torch.equal(sample(ours), sample(small_model))
    flush(store)
    assert len(store.open().entries()) == 1


def test_previews_come_at_every_step_of_a_hit(small_model, store):
    record(small_model, store)
    steps = []
    sample(attach(small_model, store), TWEAK, callback=lambda i, d, x, n: steps.append((i, n)))
    assert last_report().decision == "hit"
    assert steps == [(i, 8) for i in range(8)]


def test_a_single_frame_is_reused_too(small_model, store):
    shape = (1, 16, 1, 8, 8)
    record(small_model, store, shape=shape)
    sample(attach(small_model, store), TWEAK, shape=shape)
    report = last_report()
    assert report.decision == "hit" and report.evaluations < 8, report.notes


def test_a_batch_runs_dense_and_says_why(small_model, store):
    shape = (2, *SMALL[1:])
    got = sample(attach(small_model, store), shape=shape)
    assert last_report().decision == "dense"
    assert "batch of 2" in last_report().reason
    assert torch.equal(got, sample(small_model, shape=shape))


def test_a_lora_of_another_strength_is_another_request(small_model, store):
    name = "diffusion_model.blocks.0.ffn.0.weight"
    weight = small_model.model.state_dict()[name]
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 0.05

    def patched(strength):
        clone = small_model.clone()
        clone.add_patches({name: (change,)}, strength)
        return clone

    record(patched(1.0), store)
    sample(attach(patched(0.5), store))
    assert last_report().decision == "hit"
    assert torch.equal(sample(attach(patched(1.0), store)), sample(patched(1.0)))
    assert last_report().decision == "exact"
    before = attach(small_model, store)
    before.add_patches({name: (change,)}, 1.0)  # Carnator before the LoRA, in a graph
    sample(before)
    assert last_report().decision == "exact"


def test_other_weights_of_one_build_are_not_an_exact_hit(small_model, other_model, store):
    record(small_model, store)
    sample(attach(other_model, store))
    assert last_report().decision in ("hit", "miss")


def test_shape_schedule_and_image_are_kept_apart(small_model, store):
    record(small_model, store)
    sample(attach(small_model, store), shape=(1, 16, 1, 8, 8))
    assert last_report().decision == "miss"
    start = torch.randn(SMALL, generator=torch.Generator().manual_seed(1))
    sample(attach(small_model, store), latent=start)
    assert last_report().decision == "miss"
    assert torch.equal(
        sample(attach(small_model, store, part("carnator.request").Settings()), latent=start + 1),
        sample(small_model, latent=start + 1),
    )


def test_bank_noise_lets_seeds_build_on_each_other(small_model, store):
    noise, request = part("carnator.noise"), part("carnator.request")
    settings = request.Settings("custom", 10.0, noise_policy="bank")
    twin = next(s for s in range(8, 999) if noise.bank_index(s) == noise.bank_index(7))
    first = sample(attach(small_model, store, settings))
    flush(store)
    assert not torch.equal(first, sample(small_model))
    sample(attach(small_model, store, settings), TWEAK, seed=twin)
    assert last_report().decision == "hit"
    # Only the seed changed: a different clip is wanted, so it starts from the seed's own noise.
    own = sample(attach(small_model, store, settings), seed=twin)
    assert last_report().decision == "miss"
    assert torch.equal(own, sample(small_model, seed=twin))


def test_easycache_in_the_chain_does_not_break_it(small_model, store):
    from comfy_extras.nodes_easycache import EasyCacheNode

    cached = EasyCacheNode.execute(small_model, 0.2, 0.15, 0.95, False)[0]
    expected = sample(cached)
    assert torch.equal(sample(attach(cached, store)), expected)
    flush(store)
    sample(attach(cached, store), TWEAK)
    assert last_report().decision == "dense" and last_report().reason
    assert torch.isfinite(sample(attach(small_model, store), TWEAK)).all()
    assert last_report().decision == "miss"  # records made with another pack's help stay apart


def test_functions_after_guidance_hide_the_branches(small_model, store):
    model = small_model.clone()
    model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * 0.9)
    expected = sample(model)
    assert torch.equal(sample(attach(model, store)), expected)
    flush(store)
    (entry,) = store.open().entries()
    assert entry.meta["branched"] is False


def test_branches_are_observed(small_model, store):
    record(small_model, store)
    (entry,) = store.open().entries()
    assert entry.meta["branched"] is True
    assert len(entry.signature) > 300
