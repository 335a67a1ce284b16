"""Finding a ComfyUI to test against, and importing the pack as that host's loader does."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

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
