"""Finding a ComfyUI to test against, and importing the pack as that host's loader does."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACK = "carnator_pack"


def find_host() -> Path | None:
    """The ComfyUI checkout to test against: $COMFYUI_PATH, ~/comfy/ComfyUI, or the one whose
    custom_nodes folder the pack sits in."""
    named = os.environ.get("COMFYUI_PATH")
    places = [Path(named).expanduser()] if named else [Path.home() / "comfy" / "ComfyUI"]
    if not named and ROOT.parent.name == "custom_nodes":
        places.append(ROOT.parents[1])
    return next((p for p in places if (p / "comfy" / "samplers.py").is_file()), None)


HOST = find_host()


def load_pack() -> ModuleType:
    """The pack, imported under its own name as the host's loader does it."""
    if PACK not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACK] = module
        spec.loader.exec_module(module)
    return sys.modules[PACK]


def part(name: str) -> ModuleType:
    """A module of the pack by its dotted name, such as ``nodes.host``."""
    load_pack()
    return importlib.import_module(f"{PACK}.{name}")


def hand_over(records: Any, theirs: Any) -> None:
    """Give ComfyUI's only record the derivatives that the embedded host recorded of the same run:
    a last bit may decide between two of the 16 levels a record has for a change."""
    (donor,), (own,) = records.entries(), theirs.entries()
    later = range(1, len(donor.meta["sigmas"]))
    names = ["first", *(f"d.{i}" for i in later), *(f"g.{i}" for i in donor.meta["guidance"][1:])]
    assert own.meta["guidance"] == donor.meta["guidance"]
    tensors = {**records.read(donor.id, names), **theirs.read(own.id, ["final"])}
    theirs.clear()
    draft = part("carnator.store").Draft
    theirs.put(draft(own.partition, own.identity, own.meta, tensors, own.signature))
