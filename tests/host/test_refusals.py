"""Every reason for a dense run: its result is the host's own, and the log and the Report node say
why, the log in exactly one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.controlnet
import comfy.sample
import comfy.samplers
import pytest
import torch
from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced
from harness import part
from sampling import CAPTION, SEED, SMALL, Calls, advanced, caption, empty, guider, sample
from trial import Lines, attach, held

refusals = part("nodes.refusals")
Run = Callable[[Any, str], torch.Tensor]


def with_cond(**extra: Any) -> Run:
    """A run whose positive conditioning carries more than text."""

    def run(model: Any, words: str) -> torch.Tensor:
        positive = [[c, {**d, **extra}] for c, d in caption(words)]
        latent = torch.zeros(SMALL)
        noise = comfy.sample.prepare_noise(latent, SEED)
        return comfy.sample.sample(
            model, noise, 8, 2.5, "euler", "simple", positive, caption(""), latent,
            seed=SEED, disable_pbar=True,
        )  # fmt: skip

    return run


def on(sigmas: list[float], sampler: Any = None) -> Run:
    """A run on a schedule of its own."""

    def run(model: Any, words: str) -> torch.Tensor:
        noise, euler, _ = advanced(model=model)
        given = (noise, guider(model, words), sampler or euler, torch.tensor(sigmas), empty())
        return SamplerCustomAdvanced.execute(*given)[0]["samples"]

    return run


def by(**kwargs: Any) -> Run:
    return lambda model, words: sample(model, words, **kwargs)


class Idle(comfy.controlnet.ControlBase):
    """A ControlNet that has nothing to say."""

    def get_control(self, *_: Any) -> None:
        return None


class Unreadable:
    """A conditioning of another pack that cannot be told from another one."""

    __slots__ = ()


def unknown(model: Any, x: Any, sigmas: Any, extra_args: Any = None, **_: Any) -> Any:
    return model(x, sigmas[0] * x.new_ones([x.shape[0]]), **extra_args)


# What is asked for -> the run, and words of the reason.
RUNS: dict[str, tuple[Run, str]] = {
    "a batch": (by(shape=(2, *SMALL[1:])), "batch of 2"),
    "noise between steps": (by(sampler="euler_ancestral"), "injects noise"),
    "reads the other branch": (by(sampler="euler_cfg_pp"), "guidance branches"),
    "goes back": (by(sampler="heunpp2"), "goes back"),
    "chooses its evaluations": (by(sampler="dpm_adaptive"), "chooses its own evaluations"),
    "rises by rounding": (by(sampler="exp_heun_2_x0"), "rounding error"),
    "a pack's sampler": (
        on([1.0, 0.7, 0.5, 0.3, 0.1, 0.0], comfy.samplers.KSAMPLER(unknown)),
        "not one of the host's own",
    ),
    "churn": (
        on([1.0, 0.7, 0.5, 0.3, 0.1, 0.0], comfy.samplers.ksampler("euler", {"s_churn": 0.5})),
        "injects noise",
    ),
    "three steps": (by(steps=3), "leaves nothing to predict"),
    "a rising schedule": (on([1.0, 0.6, 0.7, 0.5, 0.3, 0.1, 0.0]), "does not fall"),
    "a repeated level": (on([1.0, 0.7, 0.7, 0.5, 0.3, 0.0]), "does not fall"),
    "a ControlNet": (with_cond(control=Idle()), "ControlNet"),
    "an unreadable condition": (with_cond(of_a_pack=Unreadable()), "cannot be compared"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_cannot_be_reused(small_model, store, name):
    run, words = RUNS[name]
    ours = attach(small_model, store)

    def seeded(model: Any, text: str) -> torch.Tensor:
        torch.manual_seed(0)
        return run(model, text)

    with Lines() as log:
        report = held(seeded, small_model, ours, CAPTION)
    assert report.decision == "dense" and words in report.reason
    assert len([line for line in log.lines if line.startswith("[Carnator]")]) == 1, log.lines
    if name not in ("three steps", "a repeated level"):  # sound as donors to runs on others
        assert report.record.startswith("not recorded") and store.open().entries() == []
    assert report.evaluations == report.dense_evaluations > 0


def test_a_store_that_cannot_be_opened(small_model, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    choice = part("nodes.host").StoreChoice(tmp_path / "file", 2**30)
    with Lines() as log:
        report = held(sample, small_model, attach(small_model, choice), CAPTION)
    assert report.decision == "dense" and "could not start" in report.reason
    assert len([line for line in log.lines if line.startswith("[Carnator]")]) == 1, log.lines


def test_a_disk_that_became_read_only(small_model, store, monkeypatch):
    """A store that was open: the run is dense and right, and so are hits on what it holds."""
    import errno
    import os

    ours = attach(small_model, store)
    sample(ours)
    store.open().flush()
    opened, real = store.open(), os.open

    def refused(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        inside = Path(os.fspath(path)).is_relative_to(store.folder) if path else False
        if inside and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as disk:
        disk.setattr(os, "open", refused)
        disk.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "ro")))
        report = held(sample, small_model, ours, "blue square up on gray")
        opened.flush()
    assert report.decision in ("miss", "hit")
    assert held(sample, small_model, ours, CAPTION).decision == "exact"
    assert len(opened.entries()) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [("gligen", "GLIGEN"), ("control", "ControlNet"), ("hooks", "carries hooks")],
)
def test_conditions_are_looked_at_in_every_entry(small_model, name, words):
    made = guider(small_model)
    made.conds = {k: [dict(e) for e in v] for k, v in made.original_conds.items()}
    noise, sigmas = torch.zeros(SMALL), torch.linspace(1, 0, 9)
    refusals.refuse(made, noise, sigmas, None)
    made.conds["negative"].append({**made.conds["negative"][0], name: object()})
    with pytest.raises(refusals.Unsupported, match=words):
        refusals.refuse(made, noise, sigmas, None)


def test_odd_inputs_are_named(small_model):
    made = guider(small_model)
    made.conds = made.original_conds
    sigmas = torch.linspace(1, 0, 9)
    for noise, given, shapes, words in (
        (torch.zeros(1, 8, 64), sigmas, None, "3 dimensions"),
        (torch.zeros(SMALL), torch.zeros(2, 2), None, "holds no step"),
        (torch.zeros(SMALL), sigmas, [SMALL, (1, 8, 4, 16)], "audio and video"),
    ):
        with pytest.raises(refusals.Unsupported, match=words):
            refusals.refuse(made, noise, given, shapes)


def test_every_refusal_counts_its_evaluations_at_the_model(small_model, store):
    calls = Calls(small_model)
    report = held(by(sampler="heunpp2"), calls.model, attach(calls.model, store), CAPTION)
    assert calls.count == 2 * report.evaluations
