"""Two-expert models: a node for high noise that leaves its noise to a node for low noise."""

from __future__ import annotations

from typing import Any

import comfy.sample
import pytest
import torch
from harness import part
from sampling import CAPTION, SEED, SMALL, TWEAK, caption, flush, last_report
from trial import FLOOR, attach, psnr, same

STEPS, SWITCH = 16, 8


class Pair:
    """The two nodes of a Wan 2.2 graph; ``reports`` are those of the last run."""

    def __init__(self, high: Any, low: Any):
        self.models, self.reports, self.boundary = (high, low), [], torch.zeros(0)

    def __call__(self, words: str, seed: int = SEED, second: str | None = None, **kwargs: Any):
        left = self.stage(0, words, torch.zeros(SMALL), seed, **kwargs)
        self.boundary = left
        return self.stage(1, second or words, left, seed, **kwargs)

    def stage(
        self,
        number: int,
        words: str,
        latent: torch.Tensor,
        seed: int = SEED,
        steps: int = STEPS,
        switch: int = SWITCH,
        sampler: str = "euler",
    ) -> torch.Tensor:
        """One KSamplerAdvanced, the first leaving its noise to the second."""
        self.reports = [*self.reports[-1:], None]
        first = number == 0
        noise = comfy.sample.prepare_noise(latent, seed) if first else torch.zeros(SMALL)
        done = comfy.sample.sample(
            self.models[number],
            noise,
            steps,
            2.5,
            sampler,
            "simple",
            caption(words),
            caption(""),
            latent,
            disable_noise=not first,
            start_step=0 if first else switch,
            last_step=switch if first else 10_000,
            force_full_denoise=not first,
            seed=seed,
            disable_pbar=True,
        )
        self.reports[-1] = last_report()
        return done

    @property
    def decisions(self) -> list[str]:
        return [r.decision for r in self.reports]


@pytest.fixture
def pair(small_model, other_model, store):
    return Pair(attach(small_model, store), attach(other_model, store))


@pytest.fixture
def plain(small_model, other_model):
    return Pair(small_model, other_model)


def test_a_changed_word_is_a_hit_in_both_stages(pair, plain, store):
    assert same(pair(CAPTION), plain(CAPTION))
    assert pair.decisions == ["miss", "miss"]
    flush(store)
    got = pair(TWEAK)
    assert pair.decisions == ["hit", "hit"], [r.reason for r in pair.reports]
    assert all(r.evaluations < r.dense_evaluations == SWITCH for r in pair.reports)
    assert psnr(got, plain(TWEAK)) >= FLOOR
    assert not same(pair.boundary, plain.boundary)  # the second went on from a reused latent


def test_each_stage_keeps_its_floor_by_itself(pair, plain, store):
    pair(CAPTION)
    flush(store)
    pair(TWEAK)
    got, mine = pair.stage(1, TWEAK, pair.boundary), pair.boundary
    assert psnr(mine, plain.stage(0, TWEAK, torch.zeros(SMALL))) >= FLOOR
    assert psnr(got, plain.stage(1, TWEAK, mine)) >= FLOOR


def test_a_repetition_is_exact_in_both_stages(pair, plain, store):
    pair(CAPTION)
    flush(store)
    assert same(pair(CAPTION), plain(CAPTION))
    assert pair.decisions == ["exact", "exact"]
    first, _ = pair.reports
    assert first.evaluations == 1


def test_the_records_are_joined_at_the_boundary(pair, store):
    pair(CAPTION)
    flush(store)
    high, low = sorted(store.open().entries(), key=lambda e: -e.meta["sigmas"][0])
    assert high.meta["labels"]["ends"] == low.meta["labels"]["begins"]
    assert "begins" not in high.meta["labels"] and "ends" not in low.meta["labels"]
    assert high.partition != low.partition


def test_only_the_second_stage_changed(pair, plain, store):
    """Another prompt for the low-noise expert alone: the first is exact, the second reuses."""
    pair(CAPTION)
    flush(store)
    got = pair(CAPTION, second=TWEAK)
    assert pair.decisions == ["exact", "hit"]
    assert psnr(got, plain(CAPTION, second=TWEAK)) >= FLOOR


def test_a_first_stage_that_is_off_leaves_the_second_to_itself(small_model, other_model, store):
    """Carnator on the low-noise model alone: it knows no origin, and compares the latents."""
    pair = Pair(small_model, attach(other_model, store))
    pair(CAPTION)
    flush(store)
    pair(CAPTION)
    assert last_report().decision == "exact"
    plain = Pair(small_model, other_model)
    assert same(pair(TWEAK), plain(TWEAK))
    assert last_report().decision == "miss"


@pytest.mark.parametrize(
    "change", [{"seed": SEED + 1}, {"switch": SWITCH - 1}], ids=["seed", "switch"]
)
def test_another_origin_or_boundary_is_apart(pair, plain, store, change):
    pair(CAPTION)
    flush(store)
    assert same(pair(TWEAK, **change), plain(TWEAK, **change))
    assert pair.decisions == ["miss", "miss"]


def test_stages_are_no_donors_to_each_other_or_to_whole_runs(pair, small_model, store):
    from sampling import sample

    sample(attach(small_model, store), steps=STEPS)
    flush(store)
    pair(CAPTION)
    assert pair.decisions == ["miss", "miss"]
    flush(store)
    sample(attach(small_model, store), TWEAK, steps=STEPS)
    assert last_report().decision == "hit"


def test_a_latent_changed_between_the_stages_has_no_origin(pair, plain, store):
    pair(CAPTION)
    flush(store)
    touched = pair.stage(0, CAPTION, torch.zeros(SMALL)) * 1.01
    got = pair.stage(1, TWEAK, touched)
    assert last_report().decision == "miss"
    assert same(got, plain.stage(1, TWEAK, touched))


def test_a_stage_that_runs_dense_is_followed_by_one_that_does_not(pair, plain, store):
    """A sampler without a contract in the first stage; it is known all the same what it left."""
    pair(CAPTION, sampler="euler_ancestral")
    assert pair.decisions[0] == "dense"
    flush(store)
    left = pair.boundary
    got = pair.stage(1, CAPTION, left)
    flush(store)
    assert last_report().decision in ("miss", "exact")
    assert same(got, plain.stage(1, CAPTION, left))


def test_three_experts(small_model, other_model, store):
    """A chain of three: the origin travels through the middle one."""
    from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced
    from sampling import advanced, empty, guider

    class Nothing:
        seed = 0

        def generate_noise(self, latent: dict) -> torch.Tensor:
            return torch.zeros_like(latent["samples"])

    def run(wrap: Any, words: str) -> torch.Tensor:
        noise, method, sigmas = advanced(steps=24, model=small_model)
        latent = empty()
        for i, model in enumerate((small_model, other_model, small_model)):
            part_sigmas = sigmas[8 * i : 8 * i + 9]
            given = (noise if i == 0 else Nothing(), guider(wrap(model), words), method)
            latent = SamplerCustomAdvanced.execute(*given, part_sigmas, latent)[0]
            decisions.append(last_report().decision if wrap is not plainly else "")
        return latent["samples"]

    def plainly(model: Any) -> Any:
        return model

    decisions: list[str] = []
    run(lambda m: attach(m, store), CAPTION)
    flush(store)
    decisions.clear()
    got = run(lambda m: attach(m, store), TWEAK)
    assert decisions == ["hit", "hit", "hit"]
    assert psnr(got, run(plainly, TWEAK)) >= FLOOR


def test_what_is_remembered_of_boundaries_is_bounded():
    stages = part("nodes.stages")
    request = part("carnator.request").Request(
        hard=dict.fromkeys(("initial", "noise", "conditioning", "latent"), "x"),
        soft={}, architecture="", sampler="euler", sigmas=(1.0, 0.5), cfg=1.0, seed=0,
    )  # fmt: skip
    for i in range(stages.KEPT + 10):
        stages.left(request, torch.full((1, 1), float(i)))
    assert len(stages._origins) == stages.KEPT
    finished = part("carnator.request").Request(
        hard={}, soft={}, architecture="", sampler="euler", sigmas=(1.0, 0.0), cfg=1.0, seed=0
    )
    before = dict(stages._origins)
    stages.left(finished, torch.zeros(1, 1))
    assert dict(stages._origins) == before
