"""The same measurements inside ComfyUI: its own loader, model and samplers, on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from carnator.demo import host as embedded

from .overhead import Clock, Run

ROOT = Path(__file__).resolve().parents[1]
PACK = "carnator_pack"
SIZE_LIMIT = 2**30


class Comfy:
    """ComfyUI with the demo model; the pack is attached to it where a run asks for that."""

    name = "ComfyUI"

    def __init__(self, model: Any, steps: int, folder: Path):
        self.model, self.steps = model, steps
        self.choice = part("nodes.host").StoreChoice(folder, SIZE_LIMIT)
        self.store = self.choice.open()
        self.clock = Clock(model.model.diffusion_model)

    def run(self, prompt: str, settings: dict[str, Any] | None = None) -> Run:
        import comfy.sample

        model, report = self.model, None
        if settings is not None:
            wanted = part("carnator.request").Settings(**settings)
            model = part("nodes.host").attach(model, wanted, self.choice)
        latent = torch.zeros(embedded.SHAPE)
        noise = comfy.sample.prepare_noise(latent, 0)
        positive, negative = conditioning(prompt), conditioning("")
        self.clock.seconds = 0.0
        began = time.perf_counter()
        out = comfy.sample.sample(
            model,
            noise,
            self.steps,
            embedded.CFG,
            "euler",
            "simple",
            positive,
            negative,
            latent,
            seed=0,
            disable_pbar=True,
        )
        seconds = time.perf_counter() - began
        if settings is not None:
            report = part("nodes.reports").find(None)
        return Run(out, seconds, self.clock.seconds, report)


def conditioning(text: str) -> list[Any]:
    """A conditioning of the demo model; empty text is the negative prompt."""
    captions = part("carnator.demo.captions")
    return [[captions.embed(captions.parse(text) if text else None)[None], {}]]


@contextmanager
def opened(model_file: Path, steps: int) -> Iterator[Comfy]:
    """ComfyUI, imported into this process, with a store of its own that is dropped at the end."""
    start()
    import comfy.sd

    model = comfy.sd.load_diffusion_model(str(model_file))
    model = part("nodes.host").with_shift(model, embedded.SHIFT)
    with tempfile.TemporaryDirectory() as folder:
        comfy_host = Comfy(model, steps, Path(folder))
        try:
            yield comfy_host
        finally:
            comfy_host.store.close()


def start() -> None:
    """Import the host for the CPU. Raises SystemExit when there is none."""
    path = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
    if not (path / "comfy" / "samplers.py").is_file():
        raise SystemExit(f"There is no ComfyUI at {path}: set COMFYUI_PATH to a checkout.")
    # The host reads its command line once, at the import of comfy.cli_args.
    arguments, sys.argv = sys.argv, ["main.py", "--cpu", "--use-pytorch-cross-attention"]
    sys.path.insert(0, str(path))
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args
    finally:
        sys.argv = arguments


def part(name: str) -> ModuleType:
    """A module of the pack, imported under one package name as the host's loader does it."""
    if PACK not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACK] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"{PACK}.{name}")
