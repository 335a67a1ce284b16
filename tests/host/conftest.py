"""The host tests' surroundings: a real ComfyUI, imported in this process on the CPU."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the tests' own helpers, in importlib mode too

from browser import find_browser
from harness import HOST, ROOT, part

collect_ignore_glob: list[str] = []
if HOST is None:
    warnings.warn(
        "HOST TESTS SKIPPED: no ComfyUI found. Set COMFYUI_PATH to a checkout to run them.",
        stacklevel=1,
    )
    collect_ignore_glob = ["test_*.py"]
else:
    # The host reads its command line once, at the import of comfy.cli_args.
    argv, sys.argv = sys.argv, ["main.py", "--cpu", "--use-pytorch-cross-attention"]
    sys.path.insert(0, str(HOST))
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args
        import utils.extra_config  # noqa: F401  as in main.py, before comfy/ is on the path too
    finally:
        sys.argv = argv
    import torch

    torch.set_flush_denormal(True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if HOST is None:
        terminalreporter.write_line("HOST TESTS SKIPPED: no ComfyUI found (set COMFYUI_PATH).")
    elif find_browser() is None:
        terminalreporter.write_line("BROWSER TESTS SKIPPED: no Chromium found (.ci/browser).")


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small model with random weights: enough for everything but the quality of reuse."""
    return write_random(tmp_path_factory.mktemp("small") / "small.safetensors", 0)


def write_random(path: Path, seed: int) -> Path:
    wan, train = part("carnator.demo.wan"), part("carnator.demo.train")
    config = wan.WanConfig(dim=48, ffn_dim=96, num_heads=2, num_layers=2)
    model = wan.WanTransformer(config)
    model.initialise(seed)
    torch.nn.init.normal_(model.head.head.weight, std=0.02)
    train.save_model(path, model.state_dict(), config)
    return path


@pytest.fixture(scope="session")
def demo_file() -> Path:
    """The bundled demo model."""
    return ROOT / "carnator" / "demo" / "models" / "wan_tiny.safetensors"


def load(path: Path) -> Any:
    import comfy.sd

    return part("nodes.host").with_shift(comfy.sd.load_diffusion_model(str(path)), 5.0)


@pytest.fixture(scope="session")
def small_model(small_file: Path) -> Any:
    """The small model as the host loads it, with the shift the demo uses."""
    return load(small_file)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of the same build with other weights."""
    return load(write_random(tmp_path_factory.mktemp("other") / "other.safetensors", 1))


@pytest.fixture(scope="session")
def demo_model(demo_file: Path) -> Any:
    return load(demo_file)


@pytest.fixture(scope="session")
def registry() -> dict[str, Any]:
    """The host's own nodes by their ids, as its server has them, and the pack's."""
    import asyncio

    import nodes

    asyncio.run(nodes.init_builtin_extra_nodes())
    for node in part("nodes").NODES:
        nodes.NODE_CLASS_MAPPINGS[node.GET_SCHEMA().node_id] = node
    return nodes.NODE_CLASS_MAPPINGS


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """A store of its own for one test."""
    choice = part("nodes.host").StoreChoice(tmp_path / "store", 2**30)
    yield choice
    choice.open().close()


@pytest.fixture(autouse=True)
def a_table_for_random_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with random weights get a risk table of their own, made for short runs, so that what
    is tested of the host does not hang on what was measured of the demo model."""
    matching, risk = part("carnator.matching"), part("carnator.risk")
    rows = tuple(
        risk.Row(n, 0.5, ((-4.0, db + 32.0, db + 31.0), (0.0, db, db - 1.0)))
        for n, db in ((3, 20.0), (4, 24.0), (6, 28.0), (8, 31.0))
    )
    changes = ("", "+cfg", "+schedule")
    kinds = {f"{k}{c}": rows for k in ("single", "second", "multistep") for c in changes}
    shipped = matching.table_for

    def table_for(architecture: str) -> Any:
        found = shipped(architecture)
        own = risk.RiskTable("random", architecture, None, 1.0, 1.0, kinds, calibrated=False)
        return found if found.calibrated else own

    monkeypatch.setattr(matching, "table_for", table_for)


@pytest.fixture(autouse=True)
def no_internal_error(caplog: pytest.LogCaptureFixture) -> Any:
    """The engine survives its own faults, so a test has to look for them in the log."""
    yield
    for phase in ("setup", "call"):
        for record in caplog.get_records(phase):
            assert "internal error" not in record.getMessage()


@pytest.fixture(autouse=True)
def as_the_host_runs_nodes() -> Any:
    """The host's executor runs every node in inference mode."""
    with torch.inference_mode():
        yield
