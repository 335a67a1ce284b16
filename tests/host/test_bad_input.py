"""What is wrong is said in one sentence at its node; what cannot be reused runs dense."""

from __future__ import annotations

import logging
import re

import comfy.samplers
import pytest
import torch
from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced
from harness import part
from sampling import SMALL, TWEAK, advanced, empty, flush, guider, last_report, loose, sample


def test_an_unknown_preset_is_named(small_model):
    with pytest.raises(ValueError, match="Unknown preset 'superb': use one of faithful"):
        part("nodes.accelerate").CarnatorAccelerate.execute(small_model, "superb", "keep", True)


def test_a_store_that_cannot_be_written_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    node = part("nodes.store").CarnatorStore
    with pytest.raises(ValueError, match=str(file)):
        node.execute(str(file), 1.0)
    with pytest.raises(ValueError, match=str(file)):
        node.execute(str(file / "inside"), 1.0)


def test_a_default_store_that_cannot_be_written_does_not_stop_a_run(small_model, tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    choice = part("nodes.host").StoreChoice(file, 2**30)
    got = sample(part("nodes.host").attach(small_model, loose(), choice))
    assert torch.equal(got, sample(small_model))
    assert last_report().decision == "dense" and str(file) in last_report().reason


@pytest.mark.parametrize("shape", [(1, 16, 2, 8), (1, 9, 2, 8, 8)])
def test_a_latent_the_model_refuses_fails_as_without_carnator(small_model, store, shape):
    latent = torch.ones(shape)

    def outcome(model):
        try:
            return sample(model, latent=latent)
        except Exception as error:
            return type(error), str(error)

    expected = outcome(small_model)
    got = outcome(part("nodes.host").attach(small_model, loose(), store))
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
    else:
        assert got == expected
    flush(store)
    assert isinstance(expected, torch.Tensor) or store.open().entries() == []


def test_a_demo_latent_of_another_shape_is_named(small_model):
    node = part("nodes.demo").CarnatorDemoDecode
    with pytest.raises(ValueError, match=r"shape \[1, 4, 8, 8\] is not one of the Wan demo model"):
        node.execute({"samples": torch.zeros(1, 4, 8, 8)}, small_model)


def test_a_caption_that_cannot_be_read_is_named():
    node = part("nodes.demo").CarnatorDemoCaption
    assert node.validate_inputs("red circle left on gray") is True
    assert node.validate_inputs("") is True
    assert node.validate_inputs(None) is True  # connected to another node
    assert "'purple'" in node.validate_inputs("purple circle left on gray")
    with pytest.raises(ValueError, match="'purple'"):
        node.execute("purple circle left on gray")


def test_a_demo_model_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no bundled model 'huge'"):
        part("nodes.demo").CarnatorLoadDemoModel.execute("huge")


def zigzag(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """A sampler that goes back up in sigma at every other step."""
    ones = x.new_ones([x.shape[0]])
    for i in range(len(sigmas) - 1):
        for sigma in (sigmas[i], sigmas[max(0, i - 1)]):
            denoised = model(x, sigma * ones, **extra_args)
        x = denoised + (x - denoised) * sigmas[i + 1] / sigma
    return x


def run(model, sampler, sigmas):
    noise, _, _ = advanced(model=model)
    result = SamplerCustomAdvanced.execute(noise, guider(model), sampler, sigmas, empty())
    return result[0]["samples"]


@pytest.mark.parametrize("known", [False, True])
def test_evaluations_that_rise_in_sigma_run_dense(small_model, store, monkeypatch, known):
    if known:  # even when it passes for one of the host's own samplers
        named = lambda *args, **kwargs: zigzag(*args, **kwargs)  # noqa: E731
        named.__name__ = "sample_euler"
        monkeypatch.setattr(comfy.k_diffusion.sampling, "sample_euler", named)
        sampler, words = comfy.samplers.KSAMPLER(named), "rises again|was not expected"
    else:
        sampler, words = comfy.samplers.KSAMPLER(zigzag), "zigzag"
    _, _, sigmas = advanced(model=small_model)
    ours = part("nodes.host").attach(small_model, loose(), store)
    for _ in range(2):
        assert torch.equal(run(ours, sampler, sigmas), run(small_model, sampler, sigmas))
        flush(store)
        report = last_report()
        assert report.evaluations == report.dense_evaluations == 16
        assert part("nodes.report").CarnatorReport.execute()[1]
        assert re.search(words, report.reason + report.record + " ".join(report.notes))
    assert store.open().entries() == []


def test_a_schedule_that_rises_runs_dense(small_model, store):
    _, sampler, sigmas = advanced(model=small_model)
    rising = torch.cat([sigmas[:4], sigmas[2:]])
    ours = part("nodes.host").attach(small_model, loose(), store)
    for _ in range(2):
        assert torch.equal(run(ours, sampler, rising), run(small_model, sampler, rising))
        flush(store)
        assert last_report().decision == "dense"
        assert "monotonically" in last_report().reason


@pytest.mark.parametrize("name", ["dpm_fast", "dpm_adaptive", "euler_cfg_pp", "lcm", "sa_solver"])
def test_samplers_without_a_contract_run_dense(small_model, store, name):
    expected = sample(small_model, sampler=name)
    ours = part("nodes.host").attach(small_model, loose(), store)
    for _ in range(2):
        assert torch.equal(sample(ours, sampler=name), expected)
        flush(store)
        assert last_report().decision == "dense" and last_report().reason


def test_a_corrupt_record_is_dropped_and_the_run_goes_on(small_model, store, caplog):
    ours = part("nodes.host").attach(small_model, loose(), store)
    sample(ours)
    flush(store)
    store.open().close()
    files = list(store.folder.rglob("*.val"))
    assert len(files) == 1
    data = bytearray(files[0].read_bytes())
    for i in range(len(data) // 2, len(data), 64):  # in the tensors, beyond the header
        data[i] ^= 0xFF
    files[0].write_bytes(bytes(data))
    with caplog.at_level(logging.WARNING, logger="carnator"):
        got = sample(ours, TWEAK)
    assert torch.equal(got, sample(small_model, TWEAK))
    assert caplog.records
    flush(store)
    assert store.open().entries() == [] or last_report().record == "submitted"
    sample(ours, "red circle left on gray")
    assert last_report().decision in ("hit", "miss")


def test_a_probe_of_another_shape_is_refused(small_model, store):
    nodes = part("nodes.pipeline")
    noise, sampler, sigmas = advanced(model=small_model)
    five = (noise, guider(small_model), sampler, sigmas)
    probe = nodes.CarnatorProbe.execute(*five, empty())[0]
    scope = nodes.CarnatorSignatureMatch.execute(probe, "balanced", store=store)[0]
    with pytest.raises(ValueError, match="belongs to another run.*latent"):
        nodes.CarnatorSparseAttentionSampler.execute(*five, empty((1, 16, 3, *SMALL[3:])), scope)
