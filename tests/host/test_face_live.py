"""What a page is told while a run goes on, that telling changes nothing, and previews' colours."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from harness import part
from sampling import SHAPE, TWEAK, flush, last_report, loose, sample

live, stores = part("nodes.live"), part("carnator.store")
CLIENT = "c" * 32


class Page:
    """In the place of the host's server: keeps what is sent."""

    def __init__(self) -> None:
        self.client_id: str | None = CLIENT
        self.last_node_id, self.last_prompt_id = "7", "p"
        self.told: list[dict[str, Any]] = []
        self.broken = False

    def send_sync(self, event: str, data: dict[str, Any], client: str) -> None:
        assert (event, client) == (live.EVENT, CLIENT)
        if self.broken:
            raise ConnectionError("the page is gone")
        self.told.append(data)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    made = Page()
    holder = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=made))
    monkeypatch.setitem(sys.modules, "server", holder)
    monkeypatch.setattr(live, "PAUSE", 0.0)  # every step
    return made


def told_model(model: Any, store: Any, told: Any = None) -> Any:
    return part("nodes.host").attach(model, loose(), store, told or live.Line("4"))


def test_a_run_tells_its_probe_its_steps_and_its_end(small_model, store, page):
    model = told_model(small_model, store)
    sample(model)
    flush(store)
    assert {tuple(one["nodes"]) for one in page.told} == {("4", "7")}
    assert [one["state"] for one in page.told] == ["probe", *["running"] * 8, "done"]
    assert [one["steps"] for one in page.told[1:-1]] == ["#" * n for n in range(1, 9)]
    assert {one["planned"] for one in page.told[:-1]} == {8}
    assert page.told[-1]["decision"] == "miss" and page.told[-1]["record"] == "submitted"

    page.told.clear()
    sample(model, TWEAK)
    end, report = page.told[-1], last_report()
    assert report.decision == end["decision"] == "hit"
    assert end["steps"].count("#") == end["evaluations"] == report.evaluations < 8
    assert end["map"] and live.shown(end["run"], "default") is report
    assert live.shown(end["run"], "somebody else") is None
    saved = [one["seconds_saved"] for one in page.told if one["state"] == "running"]
    assert saved[0] == 0 < saved[-1]
    assert {one["decision"] for one in page.told[3:]} == {"hit"}


def test_a_run_that_is_left_alone_is_told_at_its_start(small_model, store, page):
    sample(told_model(small_model, store), latent=torch.zeros(2, *SHAPE[1:3], 8, 8))
    first, last = page.told
    assert (first["state"], last["state"]) == ("aside", "done")
    assert "left alone" in first["reason"] and first["reason"] == last["reason"]


def test_a_page_that_cannot_be_told_costs_nothing(small_model, store, page):
    page.broken = True
    told = sample(told_model(small_model, store))
    assert torch.equal(told, sample(small_model)) and not page.told
    page.broken, page.client_id = False, None  # a script's prompt: nobody is told
    sample(told_model(small_model, store), TWEAK)
    assert not page.told


def test_a_cancelled_run_says_that_it_was(small_model, store, page):
    import comfy.model_management as management

    def cancel(step: int, *_: Any) -> None:
        if step == 3:
            raise management.InterruptProcessingException

    with pytest.raises(management.InterruptProcessingException):
        sample(told_model(small_model, store), callback=cancel)
    assert page.told[-1]["state"] == "done" and "cancelled" in page.told[-1]["record"]


def test_previews_have_the_host_s_own_colours(small_model):
    import latent_preview

    form = small_model.get_model_object("latent_format")
    latent = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    shown = part("nodes.colors").colors_of(small_model)(latent)
    assert shown.shape == (1, 3, 4, 16, 16)
    theirs = latent_preview.Latent2RGBPreviewer(
        form.latent_rgb_factors, form.latent_rgb_factors_bias
    )
    image = theirs.decode_latent_to_preview(form.process_in(latent))
    ours = shown[0, :, 0].permute(1, 2, 0).add(1).div(2).clamp(0, 1).mul(255).to(torch.uint8)
    assert (ours.int() - torch.from_numpy(np.array(image)).int()).abs().max() <= 1


def test_previews_of_the_demo_model_are_its_clips(demo_model):
    captions, clips = part("carnator.demo.captions"), part("carnator.demo.clips")
    import random

    clip = clips.render(captions.parse("red circle left on white"), random.Random(0))
    form = demo_model.get_model_object("latent_format")
    latent = form.process_out(clips.to_latent(clip)[None])
    shown = part("nodes.colors").colors_of(demo_model)(latent)
    assert torch.allclose(shown[0], clip, atol=1e-4)


def test_a_preview_that_fails_costs_no_record(small_model, store, monkeypatch):
    def broken(latent: Any) -> Any:
        raise RuntimeError("no such colour")

    monkeypatch.setattr(part("nodes.request"), "colors_of", lambda patcher: broken)
    sample(part("nodes.host").attach(small_model, loose(), store))
    flush(store)
    (entry,) = store.open().entries()
    frames = store.open().preview(entry.id)
    assert frames is not None and frames.shape[-1] == 3
