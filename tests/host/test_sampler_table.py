"""docs/samplers.md says of every sampler of the host what the pack does with it."""

from __future__ import annotations

from typing import Any

import pytest
import sampler_table
import torch
from comfyui_version import __version__
from harness import part
from sampling import sample
from trial import attach, tried


def test_the_document_is_up_to_date():
    """Older hosts list fewer samplers; of those they have, the document must hold."""
    text = sampler_table.FILE.read_text()
    told, now = sampler_table.written(text), sampler_table.rows()
    made, here = sampler_table.version_in(text), sampler_table.version_in(f"ComfyUI {__version__}")
    if here < made:
        assert set(now) <= set(told)
        return
    assert now == told, "write it again: python tests/host/sampler_table.py"
    if here == made:
        assert text == sampler_table.document(), "write it again"


def test_every_family_of_samplers_is_where_it_belongs():
    """What must hold whatever the tables: these read the unconditional result, or add noise."""
    found = {name: (what, why) for name, _, what, why in sampler_table.rows()}
    readers = [name for name in found if name.endswith("_cfg_pp")]
    assert len(readers) >= 5
    assert {found[name] for name in readers} == {
        ("dense", "it reads the unconditional result of every step")
    }
    noisy = [n for n in found if "ancestral" in n.removesuffix("_cfg_pp") and n not in readers]
    assert noisy and all("injects noise" in found[name][1] for name in noisy)
    assert all(why for _, why in found.values())
    assert found["euler"][0] == found["ddim"][0] == "reuses"


@pytest.mark.parametrize("name", ["heun", "dpmpp_2m"])
def test_exact_repeats_alone_without_plans(small_model, store, monkeypatch, name):
    """With the tables that are shipped, not the tests' own."""
    (told,) = [row for row in sampler_table.rows() if row[0] == name]
    if told[2] != "exact repeats":
        pytest.skip(f"there are plans for {name} now")
    monkeypatch.setattr(part("carnator.matching"), "table_for", part("carnator.risk").table_for)

    def run(model: Any, words: str) -> torch.Tensor:
        return sample(model, words, sampler=name)

    assert tried(small_model, attach(small_model, store), store, run) == ["miss", "miss", "exact"]
