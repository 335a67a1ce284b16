"""The fidelity benchmark: its metrics by hand, its pairs, its summary, and one run of it."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest
import torch

from benchmarks import batch, fidelity, measured, metrics, pairs, plot, summary, table
from benchmarks.competitors import COMPETITORS
from benchmarks.measured import Measured, Point
from carnator.demo import captions, clips, host
from carnator.demo.model import EmbeddedModel
from carnator.demo.wan import WanConfig, WanTransformer

RED = captions.parse("red circle left on gray")


# Metrics.


def test_equal_clips_are_alike_and_noise_is_not():
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(2, 3, 2, 16, 16, generator=generator) * 2 - 1
    assert metrics.ssim(a, a) == pytest.approx([1.0, 1.0])
    b = torch.rand(2, 3, 2, 16, 16, generator=generator) * 2 - 1
    assert max(metrics.ssim(a, b)) < 0.2


def test_ssim_of_flat_clips_is_its_luminance_term():
    a, b = torch.full((1, 3, 1, 11, 11), 0.5), torch.full((1, 3, 1, 11, 11), 0.25)
    c1 = (0.01 * 2) ** 2
    wanted = (2 * 0.5 * 0.25 + c1) / (0.5**2 + 0.25**2 + c1)
    assert metrics.ssim(a, b) == pytest.approx([wanted])


def test_ssim_of_one_window_by_hand():
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 1, 1, 1, 11, 11, generator=generator).double().unbind(0)
    line = [math.exp(-((i - 5) ** 2) / (2 * 1.5**2)) for i in range(11)]
    weights = [[u * v / sum(line) ** 2 for v in line] for u in line]

    def average(values):
        return sum(weights[i][j] * float(values[i][j]) for i in range(11) for j in range(11))

    x, y = a[0, 0, 0], b[0, 0, 0]
    mx, my = average(x), average(y)
    vx, vy = average((x - mx) ** 2), average((y - my) ** 2)
    shared = average((x - mx) * (y - my))
    c1, c2 = 0.02**2, 0.06**2
    wanted = (2 * mx * my + c1) * (2 * shared + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    assert metrics.ssim(a, b) == pytest.approx([wanted], abs=1e-9)


def test_a_frame_smaller_than_the_window_is_refused():
    with pytest.raises(ValueError, match="smaller than SSIM's window"):
        metrics.ssim(torch.zeros(1, 3, 1, 8, 8), torch.zeros(1, 3, 1, 8, 8))


@pytest.mark.parametrize(
    ("target", "shown", "wanted"),
    [
        ("red square left on gray", "red square left on gray", 0.0),
        ("red square left on gray", "red circle left on gray", 1.0),
        ("blue circle left on gray", "red circle left on gray", 1.0),
        ("blue circle left on gray", "red square left on gray", 2 / 3),  # red, and moving left
        ("blue circle left on white", "blue circle left on gray", 1 / 4),  # of 4 the background
        ("red circle left on gray", "red circle left on gray", None),
    ],
)
def test_leakage_is_what_only_the_donor_asked_for(target, shown, wanted):
    clip = clips.render(captions.parse(shown), random.Random(0))
    assert metrics.leakage(clip, RED, captions.parse(target)) == wanted


def test_a_thing_that_goes_leaves_three_attributes_to_leak():
    donor = captions.parse("red circle left and blue square still on gray")
    clip = clips.render(donor, random.Random(0))
    assert metrics.leakage(clip, donor, RED) == 1.0
    assert metrics.leakage(clips.render(RED, random.Random(0)), donor, RED) == 0.0


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = WanConfig(dim=24, ffn_dim=32, num_heads=2, num_layers=1)
    return EmbeddedModel(WanTransformer(config), "tiny")


def test_a_latents_psnr_is_its_clips(model):
    clip = clips.render(RED, random.Random(0)) * 0.8
    latent = model.family.to_latent(clip)[None]
    other = model.family.to_latent(clip + 0.1)[None]
    pair = batch.Pair("color", RED, RED, 0)
    (found,) = metrics.judge(model, other, latent, [pair])
    assert found.psnr_db == pytest.approx(20 * math.log10(2 / 0.1), abs=1e-3)
    assert found.clip_db == pytest.approx(found.psnr_db, abs=1e-3)
    assert found.leakage is None
    (same,) = metrics.judge(model, latent, latent, [pair])
    assert same.psnr_db == same.clip_db == metrics.CAP_DB


# Pairs.


def test_pairs_are_stratified_and_held_out():
    drawn = pairs.stratified(24)
    counts = [sum(p.kind == kind for p in drawn) for kind in pairs.KINDS]
    assert counts == [3, 3, 3, 3, 2, 2, 2, 2, 2, 2]
    assert all(p.target.held_out for p in drawn)
    assert set(drawn) < set(pairs.stratified(80))
    kept_clear = {
        str(p.target) for p in batch.held_out_pairs(pairs.PAIR_SEED, pairs.WORDS, pairs.PER_KIND)
    }
    assert {str(p.target) for p in pairs.stratified(240)} <= kept_clear
    for total in (0, 241):
        with pytest.raises(ValueError, match="use 1 to 240"):
            pairs.stratified(total)


def test_a_setting_changes_alone():
    plain = batch.Pair("", RED, RED, 0)
    changed = {"cfg": "target_cfg", "steps": "target_steps", "shift": "target_shift"}
    for pair in pairs.stratified(240):
        bare = dataclasses.replace(pair, kind="", donor=RED, target=RED, seed=0)
        if pair.kind in pairs.WORDS:
            assert pair.donor != pair.target and bare == plain
        else:
            name = changed.get(pair.kind, "lora")
            assert pair.donor == pair.target
            assert getattr(bare, name) != getattr(plain, name)
            assert dataclasses.replace(bare, **{name: getattr(plain, name)}) == plain


def test_a_chunk_shares_weights_and_schedule():
    found = list(pairs.chunks(pairs.stratified(80)))
    assert sorted(map(str, (p for c in found for p in c))) == sorted(map(str, pairs.stratified(80)))
    for chunk in found:
        assert len(chunk) <= pairs.CHUNK
        assert len({(p.target_steps, p.target_shift, p.lora) for p in chunk}) == 1


def test_evaluations_count_as_those_of_thirty_steps():
    assert pairs.normalised(10, 30) == 10 and pairs.normalised(8, 24) == 10


# Summary.


def point(knob, evaluations, db, leakage=None):
    return Point(knob, evaluations, db, db, 0.9, 1.0, leakage)


def pair_result(decision, db, evaluations, easy, donor, leakage=None):
    made = Measured("shape", "a", "b", 1, "", decision, "", 0.1, 0.2, evaluations, 30)
    made.own, made.dense = point(31.0, evaluations, db, leakage), point(0, 30, 59.0, 0.0)
    made.shown = point(0, 0, 12.0, 1.0)
    made.curves = {
        "carnator": [point(25.0, 5, db - 6), point(31.0, evaluations, db)],
        "easycache": [point(knob, n, x) for knob, n, x in easy],
        "donor": [point(n, n, x) for n, x in donor],
    }
    return made


@pytest.fixture
def results():
    return [
        pair_result("hit", 34.0, 8, [(0.4, 10, 24.0), (0.2, 20, 34.0)], [(5, 28), (10, 36)], 0.1),
        pair_result("hit", 30.0, 10, [(0.4, 12, 26.0), (0.2, 18, 36.0)], [(5, 26), (10, 32)], 0.0),
        pair_result("miss", 59.0, 30, [], [(5, 20), (10, 33)]),
        pair_result("miss", 59.0, 30, [], [(5, 20), (10, 25)]),
    ]


def test_the_summary_by_hand(results):
    found = summary.summarise(results, "balanced")
    assert (found["pairs"], found["accepted"], found["best_competitor"]) == (4, 2, "easycache")
    # 25 dB at 11 evaluations and 35 dB at 19: 31 dB at 11 + 8 * 0.6.
    assert found["competitor_evaluations_at_31db"] == {"easycache": 15.8}
    # 26 dB at 5 and 32 dB at 9: 31 dB at 5 + 4 * 5 / 6.
    assert found["evaluations_at_31db"] == pytest.approx(8.333, abs=1e-3)
    assert found["evaluation_ratio_at_31db"] == pytest.approx(15.8 / 8.333, abs=1e-3)
    # 27 dB at 5 and 34 dB at 10: 31 dB at 5 + 5 * 4 / 7.
    assert found["plan_ratio_at_31db"] == pytest.approx(15.8 / 7.857, abs=1e-3)
    assert found["p10_db"] == {
        "carnator": 30.4,
        "competitor": 34.2,
        "competitor_knob": 0.2,
        "competitor_evaluations": 19,
    }
    # Tenth percentiles: 24.2 dB at 11 and 34.2 dB at 19; 24.4 dB at 5 and 30.4 dB at 9.
    assert found["at_31db_p10"]["competitors"]["easycache"] == pytest.approx(16.44)
    assert found["at_31db_p10"]["carnator"] == 30  # never reached
    assert found["evaluation_ratio_at_31db_p10"] == pytest.approx(0.548)
    assert found["words"]["evaluation_ratio_at_31db"] == found["evaluation_ratio_at_31db"]
    assert found["settings"]["accepted"] == 0
    assert found["settings"]["evaluation_ratio_at_31db"] is None
    assert found["accepted_at_preset"]["reached"] == 0.5
    assert found["leakage_over_dense"] == 0.05
    assert found["accepted_below_floor"] == found["below_floor_share"] == 0.5
    # The median hit has 9 evaluations: judged at 10, where one of the two refused has 33 dB.
    assert (found["refused_but_fine"], found["refused_judged_at"]) == (0.5, 10)
    assert found["evaluation_ratio"] == pytest.approx((30 / 8 + 3) / 2, abs=1e-3)
    assert found["own_ratio"] is None
    assert found["published"]["easycache"]["psnr_db"] == 35.0
    json.dumps(found)


def test_a_summary_without_hits_has_no_figures_to_show(results):
    found = summary.summarise(results[2:], "balanced")
    assert found["accepted"] == 0 and found["evaluation_ratio_at_31db"] is None
    assert found["refused_but_fine"] is None and found["leakage_over_dense"] is None
    assert "0 of 2 tweaks accepted" in table.text("wan", found)


def test_a_curve_averages_only_settings_that_every_pair_has(results):
    results[1].curves["easycache"].pop()
    assert list(summary.curves(results[:2])["easycache"]) == [0.4]


# The run.


def test_carnator_is_run_as_a_user_runs_it(model):
    pair = batch.Pair("shape", RED, captions.parse("red square left on gray"), 3)
    session = measured.play(model, model, pair, "balanced", (20.0, 31.0))
    shown, plain = (host.generate(model, c, seed=3) for c in (pair.donor, pair.target))
    found = session.measured
    assert found.decision in ("hit", "miss") and found.total == host.STEPS
    assert len(session.others) == (2 if found.accepted else 0)
    if not found.accepted:
        assert session.own.evaluations == host.STEPS
        assert torch.equal(session.own.latent, plain.latent)
    assert torch.equal(session.donor.at(0.0), shown.latent[0])
    assert torch.equal(session.donor.at(1.0), host.seed_noise(3)[0])
    first = (session.donor.at(1.0) - session.donor.at(session.donor.sigmas[1])) / (
        1 - session.donor.sigmas[1]
    )
    recorded = session.record.at(1.0, host.CFG)[0]
    # Kept in int8; guidance enlarges the rounding.
    assert float((first - recorded).square().mean() / first.square().mean()) < 5e-3


def test_the_benchmark_runs_from_pairs_to_files(model, monkeypatch, tmp_path):
    quick = tuple(
        dataclasses.replace(c, knobs=(c.published or c.knobs[len(c.knobs) // 2],))
        for c in COMPETITORS
    )
    monkeypatch.setattr(fidelity, "COMPETITORS", quick)
    monkeypatch.setattr(fidelity, "COUNTS", (8.0,))
    monkeypatch.setattr(fidelity, "POOL", 2)
    monkeypatch.setattr(fidelity, "FIT_RUNS", 1)
    chosen = [p for p in pairs.stratified(20) if p.kind in ("shape", "steps")][:2]
    found = fidelity.Bench(model, chosen, "balanced", quick=False).run()
    assert [m.kind for m in found] == [p.kind for p in chosen]
    for m in found:
        assert set(m.curves) >= {c.name for c in COMPETITORS} | {"donor"}
        assert m.dense is not None and m.dense.psnr_db == metrics.CAP_DB
    figures = summary.summarise(found, "balanced")
    path = tmp_path / "out.json"
    fidelity.save(path, {"command": "x", "summary": {"wan": figures}, "pairs": {"wan": found}})
    data = json.loads(path.read_text())
    assert data["pairs"]["wan"][0]["curves"]["plain"][0][0] == quick[0].knobs[0]
    assert data["summary"]["wan"]["pairs"] == 2
    pytest.importorskip("matplotlib")
    plot.fidelity_plot(data["summary"], data["pairs"], tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_all_means_the_backbones_that_are_there(tmp_path):
    assert [m.family.name for m in fidelity.models("wan", None)] == ["wan"]
    with pytest.raises(FileNotFoundError, match="There is no model at"):
        fidelity.models("all", tmp_path / "none.safetensors")
