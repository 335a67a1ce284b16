"""Sparse attention in whole runs of the embedded host: observed, reused, refused, and lied to."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from carnator import sparse, sparse_records
from carnator.connectivity import Geometry, Layer, Packed, Static, layout, pack
from carnator.connectivity.template import Static as Other
from carnator.demo import captions, families, host
from carnator.demo.model import EmbeddedModel
from carnator.request import Settings
from carnator.store import Store

CAPTION = "red circle left and blue square still on gray"
TWEAK = "green circle left and blue square still on gray"
STEPS = 16
FORCED = {"sparse": "auto", "attention": "gather"}


@pytest.fixture(scope="module")
def model():
    return EmbeddedModel.load()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, model):
    """A store with an observed run, which tests leave as it is."""
    with Store(tmp_path_factory.mktemp("recorded")) as made:
        run(model, made, CAPTION, **FORCED)
        yield made


@pytest.fixture(scope="module")
def without(recorded, model):
    """The hit that the tweak is without sparse attention."""
    return run(model, recorded, TWEAK)


def run(model, store, text, seed=30, steps=STEPS, **settings):
    chosen = Settings(**{"preset": "custom", "budget_db": 10.0, **settings})
    done = host.generate(
        model, captions.parse(text), seed=seed, steps=steps, settings=chosen, store=store
    )
    store.flush()
    return done


def plain(model, text, seed=30):
    return host.generate(model, captions.parse(text), seed=seed, steps=STEPS).latent


@pytest.mark.parametrize("family", families.FAMILIES)
def test_an_observed_run_is_the_hosts_own_to_the_last_bit(store, family):
    model = EmbeddedModel.load(families.named(family).path)
    done = run(model, store, CAPTION, **FORCED)
    assert done.report.decision == "miss" and done.report.sparse.observed == 3
    assert torch.equal(done.latent, plain(model, CAPTION))
    (entry,) = store.entries()
    shape = model.token_layout()
    grid = shape.grid(done.latent.shape)
    at = layout(grid, captions.TEXT_TOKENS if shape.text == "first" else 0)
    heads = shape.heads
    masks = Packed(
        sparse_records.read(store, entry), Geometry.of(at, shape.layers, heads), Static(at, heads)
    )
    assert masks.sigmas == pytest.approx([0.95, 0.80, 0.50], abs=0.06)
    text = "Sparse attention: observed at 3 noise levels"
    assert text in done.report.text() and json.dumps(done.report.as_dict())


def test_switched_off_nothing_is_seen_and_nothing_is_kept(store, model, monkeypatch):
    monkeypatch.setattr(sparse, "SparseAttention", None)
    done = run(model, store, CAPTION)
    assert done.report.sparse is None and "Sparse" not in done.report.text()
    assert sparse_records.MASKS not in store.entries()[0].meta
    again = run(model, store, TWEAK)
    assert again.report.decision == "hit"


def test_a_hit_attends_sparsely_where_its_heads_allow_it(recorded, model, without):
    done = run(model, recorded, TWEAK, **FORCED)
    assert done.report.decision == without.report.decision == "hit"
    assert done.report.evaluations == without.report.evaluations
    said = done.report.sparse
    assert 0 < said.evaluations <= done.report.evaluations - sparse.FIRST
    assert said.calls["gather"] > 0 and CAPTION in said.source
    assert not torch.equal(done.latent, without.latent)
    for use in said.layers:
        assert use.least_recall is None or use.least_recall >= 0.95
    # Or tests of masks that lie would show nothing.
    assert sum(use.heads["fused"] for use in said.layers) > 0
    assert said.layers[0].calls == 0, "the first layer stays dense"
    assert "least recall" in done.report.text() and json.dumps(done.report.as_dict())


def test_masks_are_widened_by_the_blocks_that_are_the_targets_own(recorded, model, monkeypatch):
    scopes, targets = [], []

    def told(weight, at):
        scopes.append(tuple(weight.shape))
        return torch.arange(at.blocks) < 5

    monkeypatch.setattr(sparse, "target_blocks", told)
    retarget = sparse.Reuse.retarget
    monkeypatch.setattr(
        sparse.Reuse,
        "retarget",
        lambda self, target: (retarget(self, target), targets.append(self.target)),
    )
    done = run(model, recorded, TWEAK, **FORCED)
    assert done.report.decision == "hit"
    assert set(scopes) == {(1, 1, 4, 16, 16)} and targets
    assert all(int(target.sum()) == 5 for target in targets)


def test_auto_leaves_so_small_a_model_alone(recorded, model, without):
    done = run(model, recorded, TWEAK, sparse="auto")
    assert torch.equal(done.latent, without.latent)
    assert done.report.sparse.evaluations == 0 and "would not pay" in done.report.text()


def test_auto_does_not_observe_where_it_would_not_pay(store, model):
    done = run(model, store, CAPTION, sparse="auto")
    assert "would not pay" in done.report.sparse.reason
    assert sparse_records.MASKS not in store.entries()[0].meta
    assert torch.equal(done.latent, plain(model, CAPTION))


def test_a_refused_run_that_is_not_recorded_reuses_connectivity_alone(recorded, model):
    done = run(model, recorded, TWEAK, seed=31, record=False, **FORCED)
    report = done.report
    assert report.decision == "connectivity" and report.evaluations == STEPS
    assert report.sparse.evaluations == STEPS - sparse.FIRST and report.record == "not recorded"
    own = plain(model, TWEAK, seed=31)
    away = float((done.latent - own).norm() / own.norm())
    assert 0 < away < 0.1
    assert len(recorded.entries()) == 1


def test_the_donors_masks_come_first_and_other_runs_make_the_template(store, model, monkeypatch):
    made = []
    init = sparse.Reuse.__init__
    monkeypatch.setattr(
        sparse.Reuse, "__init__", lambda self, *a, **k: (made.append(a), init(self, *a, **k))[1]
    )
    run(model, store, CAPTION, **FORCED)
    run(model, store, "yellow triangle up on white", seed=7, **FORCED)
    done = run(model, store, TWEAK, **FORCED)
    (_, _, _, template, donor) = made[0]
    mine = next(e for e in store.entries() if e.meta["seed"] == 30)
    other = next(e for e in store.entries() if e.meta["seed"] == 7)
    assert donor.data == sparse_records.read(store, mine) and CAPTION in done.report.sparse.source
    assert [r.data for r in template.records] == [sparse_records.read(store, other)]


def test_a_refused_run_that_is_recorded_stays_dense(store, model):
    run(model, store, CAPTION, **FORCED)
    done = run(model, store, TWEAK, seed=31, **FORCED)
    assert done.report.decision == "miss" and done.report.sparse.observed == 3
    assert torch.equal(done.latent, plain(model, TWEAK, seed=31))
    assert len(store.entries()) == 2


def test_a_density_keeps_denser_heads_dense(recorded, model, without):
    done = run(model, recorded, TWEAK, sparse="0.05", attention="gather")
    assert done.report.sparse.evaluations == 0
    assert torch.equal(done.latent, without.latent)


def masks_of(kind, data, at, layers, heads):
    """What a record may come with instead of its masks."""
    geometry, static = Geometry.of(at, layers, heads), Static(at, heads)
    every = torch.ones(heads, dtype=torch.bool)
    if kind == "garbage":
        return b"\x00" * 4000
    if kind == "cut":
        return data[:-7]
    if kind == "another backbone":
        return pack([[None] * 9], [0.9], Geometry.of(at, 9, heads), static)
    if kind == "another size":
        other = layout((2, 8, 8))
        return pack(
            [[None] * layers], [0.9], Geometry.of(other, layers, heads), Static(other, heads)
        )
    if kind == "another template":
        return pack([[None] * layers], [0.9], geometry, Other(at, heads, 0.9))
    mask = torch.zeros(heads, at.blocks, at.blocks, dtype=torch.bool)
    if kind == "random":
        mask = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    return pack([[Layer(mask, every)] * layers], [0.9], geometry, static)


@pytest.mark.parametrize(
    "kind",
    ["garbage", "cut", "another backbone", "another size", "another template", "random", "empty"],
)
def test_masks_that_lie_are_caught_and_never_used(recorded, model, without, monkeypatch, kind):
    (entry,) = recorded.entries()
    data = sparse_records.read(recorded, entry)
    at, shape = layout((4, 8, 8)), model.token_layout()
    lie = masks_of(kind, data, at, shape.layers, shape.heads)
    monkeypatch.setattr(sparse_records, "read", lambda *_: lie)
    done = run(model, recorded, TWEAK, **FORCED)
    said = done.report.sparse
    assert done.report.decision == "hit"
    assert sum(use.heads["fused"] for use in said.layers) == 0
    if said.evaluations:  # the template joined to it held enough, on the run's own queries
        assert kind in ("random", "empty")
        assert all(u.least_recall is None or u.least_recall >= 0.95 for u in said.layers)
    else:
        assert torch.equal(done.latent, without.latent)
        assert "Sparse attention: not used (" in done.report.text()


def test_a_fault_leaves_the_run_dense_and_is_told_once(
    recorded, model, without, monkeypatch, caplog
):
    def broken(*args, **kwargs):
        raise RuntimeError("no luck")

    monkeypatch.setattr(sparse.Reuse, "connections", broken)
    with caplog.at_level(logging.INFO, "carnator"):
        done = run(model, recorded, TWEAK, **FORCED)
    assert torch.equal(done.latent, without.latent) and done.report.decision == "hit"
    assert "internal error" in done.report.sparse.reason
    assert len([r for r in caplog.records if "no luck" in r.getMessage()]) == 1


def test_a_fault_while_observing_costs_the_masks_alone(store, model, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no luck")

    monkeypatch.setattr(sparse.Recorder, "see", broken)
    done = run(model, store, CAPTION, **FORCED)
    assert torch.equal(done.latent, plain(model, CAPTION))
    assert done.report.record == "submitted"
    assert sparse_records.MASKS not in store.entries()[0].meta


def test_passes_of_another_number_of_layers_are_not_trusted(store, model, monkeypatch):
    five = lambda self: sparse.TokenLayout("x", 16, (1, 2, 2), 4, 32, 5)  # noqa: E731
    monkeypatch.setattr(EmbeddedModel, "token_layout", five)
    done = run(model, store, CAPTION, **FORCED)
    assert "no passes of 5 layers" in done.report.sparse.reason
    assert sparse_records.MASKS not in store.entries()[0].meta


def test_noise_levels_without_bound_are_brought_to_those_of_flow_models():
    assert sparse.flow_levels([1.0, 0.5]) == [1.0, 0.5]
    assert sparse.flow_levels([9.0, 1.0]) == [0.9, 0.5]


@pytest.mark.parametrize("wrong", ["on", "0", "1.5", "nan", ""])
def test_settings_refuse_what_is_no_density(wrong):
    with pytest.raises(ValueError, match="density"):
        Settings(sparse=wrong)
