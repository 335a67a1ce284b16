"""The attention override inside the host's own models and sampling."""

from __future__ import annotations

from typing import Any

import comfy.sample
import pytest
import torch
from harness import part
from sampling import CAPTION, SEED, SHAPE, TWEAK, flush, last_report, sample

STEPS = 4
STEPS2 = 16  # enough of them for three noise levels and a plan


def with_override(model: Any, override: Any) -> Any:
    clone = model.clone()
    inner = clone.model_options.setdefault("transformer_options", {})
    clone.model_options["transformer_options"] = {**inner, "optimized_attention_override": override}
    return clone


def run(model: Any) -> torch.Tensor:
    return sample(model, steps=STEPS, shape=SHAPE)


@pytest.fixture(scope="module")
def layout() -> Any:
    return part("carnator.connectivity").layout((4, 8, 8))


def plan_for(layout: Any, density: float, seen: list) -> Any:
    attention, override = part("carnator.attention"), part("carnator.attention.override")
    mask = part("carnator.connectivity").nearest(layout, density).expand(4, -1, -1)
    held = override.Connections(attention.KeyLists(mask, layout.block), layout.order)

    def plan(call: Any) -> Any:
        seen.append((call.to_itself, tuple(call.q.shape[1:]), call.k.shape[2]))
        return held if call.to_itself and call.q.shape[2] == layout.tokens else None

    return plan


def test_with_nothing_to_do_the_run_is_the_hosts_to_the_last_bit(demo_model: Any) -> None:
    watch = part("carnator.attention.override").SparseAttention(lambda call: None)
    assert torch.equal(run(with_override(demo_model, watch)), run(demo_model))
    assert watch.used["host"] > 0 and not watch.failed


def test_a_mask_that_keeps_all_changes_rounding_only(demo_model: Any, layout: Any) -> None:
    seen: list = []
    module = part("carnator.attention.override")
    watch = module.SparseAttention(plan_for(layout, 1.0, seen), backend="gather")
    plain, out = run(demo_model), run(with_override(demo_model, watch))
    assert float((out - plain).norm() / plain.norm()) < 1e-4
    # Self-attention over the video and cross-attention to the text, in every block.
    assert watch.used["gather"] == watch.used["host"] > 0 and not watch.failed
    assert {s[0] for s in seen} == {True, False} and {s[1] for s in seen} == {(4, 256, 32)}


def test_a_sparse_run_comes_near_and_auto_leaves_so_small_a_model_dense(
    demo_model: Any, layout: Any
) -> None:
    module = part("carnator.attention.override")
    watch = module.SparseAttention(plan_for(layout, 0.6, []), backend="gather")
    plain, out = run(demo_model), run(with_override(demo_model, watch))
    away = float((out - plain).norm() / plain.norm())
    assert 1e-3 < away < 0.5 and watch.used["gather"] > 0
    auto = module.SparseAttention(plan_for(layout, 0.6, []))
    assert torch.equal(run(with_override(demo_model, auto)), plain)
    assert set(auto.used) == {"host"}


def test_the_hosts_words_are_all_understood() -> None:
    """A word of the host's attention that is unknown here would quietly keep it dense."""
    import inspect

    from comfy.ldm.modules import attention

    hostcall = part("carnator.attention.hostcall")
    names = [
        p.name
        for p in inspect.signature(attention.attention_pytorch).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert tuple(names) == hostcall.POSITIONAL


# --- in runs that Carnator accelerates -----------------------------------------------------------


def wanted(**changes: Any) -> Any:
    """Sparse attention by a back end that does not ask whether it pays."""
    settings = {"sparse": "auto", "attention": "gather", **changes}
    return part("carnator.request").Settings("custom", 10.0, **settings)


def accelerated(
    model: Any, store: Any, text: str = CAPTION, seed: int = SEED, **changes: Any
) -> Any:
    """The latent and the report of one run."""
    ours = part("nodes.host").attach(model, wanted(**changes), store)
    latent = sample(ours, text, steps=STEPS2, shape=SHAPE, cfg=4.0, seed=seed)
    flush(store)
    return latent, last_report()


def alone(model: Any, text: str = CAPTION, seed: int = SEED) -> torch.Tensor:
    return sample(model, text, steps=STEPS2, shape=SHAPE, cfg=4.0, seed=seed)


def test_an_observed_run_is_untouched_and_a_hit_reuses_its_masks(
    demo_model: Any, store: Any
) -> None:
    first, report = accelerated(demo_model, store)
    assert report.decision == "miss" and report.sparse.observed == 3
    assert torch.equal(first, alone(demo_model))
    assert store.open().entries()[0].meta["masks"] is True
    dense, plain = accelerated(demo_model, store, TWEAK, sparse="off")
    latent, report = accelerated(demo_model, store, TWEAK)
    assert plain.sparse is None and plain.decision == report.decision == "hit"
    assert report.evaluations == plain.evaluations
    said = report.sparse
    assert said.evaluations > 0 and said.calls["gather"] > 0
    assert not torch.equal(latent, dense)
    assert float((latent - dense).norm() / dense.norm()) < 0.2
    assert sum(use.heads["fused"] for use in said.layers) > 0
    assert all(u.least_recall is None or u.least_recall >= 0.95 for u in said.layers)


def test_auto_leaves_the_hit_of_a_small_model_to_the_last_bit(demo_model: Any, store: Any) -> None:
    accelerated(demo_model, store)
    dense, _ = accelerated(demo_model, store, TWEAK, sparse="off")
    latent, report = accelerated(demo_model, store, TWEAK, attention="auto")
    assert report.decision == "hit" and report.sparse.evaluations == 0
    assert torch.equal(latent, dense) and "would not pay" in report.text()


def test_connectivity_alone_where_nothing_else_is_reused_or_kept(
    demo_model: Any, store: Any
) -> None:
    accelerated(demo_model, store)
    latent, report = accelerated(demo_model, store, TWEAK, seed=SEED + 1, record=False)
    assert report.decision == "connectivity" and report.evaluations == STEPS2
    own = alone(demo_model, TWEAK, SEED + 1)
    assert 0 < float((latent - own).norm() / own.norm()) < 0.2
    latent, report = accelerated(demo_model, store, TWEAK, seed=SEED + 1)
    assert report.decision == "miss" and torch.equal(latent, own)


def test_masks_are_the_same_in_the_embedded_host(
    demo_model: Any, store: Any, tmp_path: Any
) -> None:
    """One model, one request, two hosts: their observers must mean the same layers and tokens."""
    accelerated(demo_model, store)
    records, demo = part("carnator.sparse_records"), part("carnator.demo.host")
    captions, model = part("carnator.demo.captions"), part("carnator.demo.model")
    with part("carnator.store").Store(tmp_path / "embedded") as own:
        demo.generate(
            model.EmbeddedModel.load(), captions.parse(CAPTION), seed=SEED, steps=STEPS2,
            settings=wanted(), store=own,
        )  # fmt: skip
        own.flush()
        ours = records.read(own, own.entries()[0])
    theirs = records.read(store.open(), store.open().entries()[0])
    at = part("carnator.connectivity").layout((4, 8, 8))
    module = part("carnator.connectivity")
    geometry, static = module.Geometry.of(at, 6, 4), module.Static(at, 4)
    one, other = (module.Packed(data, geometry, static) for data in (ours, theirs))
    assert one.sigmas == pytest.approx(other.sigmas, abs=1e-5)
    compared = 0
    for anchor in range(3):
        for layer in range(6):
            a, b = one.layer(anchor, layer), other.layer(anchor, layer)
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                compared += 1
                assert float((a.mask ^ b.mask).float().mean()) < 0.01  # rounding at the border
    assert compared > 0


@pytest.mark.parametrize("family", ["hunyuan", "ltx"])
def test_other_families_are_observed_and_reused(family: str, store: Any) -> None:
    families, demo = part("carnator.demo.families"), part("nodes.demo")
    found = families.named(family)
    model = demo.CarnatorLoadDemoModel.execute(found.path.stem)[0]
    host, latent = part("nodes.host"), torch.zeros(found.shape)

    def run(model: Any, text: str) -> torch.Tensor:
        return comfy.sample.sample(
            model, comfy.sample.prepare_noise(latent, SEED), STEPS2, 4.0, "euler", "simple",
            demo.CarnatorDemoCaption.execute(text, model)[0],
            demo.CarnatorDemoCaption.execute("", model)[0], latent, seed=SEED, disable_pbar=True,
        )  # fmt: skip

    ours = host.attach(model, wanted(), store)
    assert torch.equal(run(ours, CAPTION), run(model, CAPTION))
    flush(store)
    assert last_report().sparse.observed == 3
    # Kept or not, refused or not: some of the masks are tried.
    run(host.attach(model, wanted(record=False), store), TWEAK)
    report = last_report()
    assert report.decision != "exact" and not report.sparse.reason
    assert any(use.calls for use in report.sparse.layers), "masks were tried"
    assert all(u.least_recall is None or u.least_recall >= 0.95 for u in report.sparse.layers)


def test_the_nodes_inputs_are_live(demo_model: Any, store: Any) -> None:
    node = part("nodes.accelerate").CarnatorAccelerate
    for choice in part("nodes.accelerate").SPARSE:
        model = node.execute(
            demo_model, "balanced", "keep", True, sparse_attention=choice, store=store
        )
        (wrapper,) = model[0].get_wrappers(part("nodes.host").OUTER, "carnator")
        assert wrapper.settings.sparse == choice
