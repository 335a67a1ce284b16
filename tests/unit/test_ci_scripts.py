"""The scripts under .ci: which ComfyUI checkouts and environments they find, make and refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("browser", "env", "host-tests", "hosts", "import-guard", "run", "types")

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("bash") is None, reason="the scripts are for bash"
)


def checkout(folder: Path) -> Path:
    """An empty stand-in for a ComfyUI checkout."""
    (folder / "comfy").mkdir(parents=True)
    (folder / "comfy" / "samplers.py").touch()
    return folder.resolve()


def run(
    script: Path | str, *arguments: str, home: Path, comfyui: str | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script of .ci with no host in sight but those of `home` and `comfyui`."""
    environment = {k: v for k, v in os.environ.items() if k != "COMFYUI_PATH"}
    environment |= {"HOME": str(home), **extra}
    if comfyui is not None:
        environment["COMFYUI_PATH"] = comfyui
    command = ["bash", str(ROOT / ".ci" / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def found(*arguments: str, **options: object) -> list[Path]:
    result = run("hosts", *arguments, **options)  # type: ignore[arg-type]
    assert result.returncode == 0, result.stderr
    return [Path(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_and_can_be_executed(name: str) -> None:
    path = ROOT / ".ci" / name
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0


def test_every_script_is_listed_here() -> None:
    assert sorted(path.name for path in (ROOT / ".ci").iterdir()) == sorted(SCRIPTS)


def test_no_checkout_prints_nothing(tmp_path: Path) -> None:
    assert found(home=tmp_path) == []


def test_checkout_in_the_home_folder_and_its_siblings(tmp_path: Path) -> None:
    newest = checkout(tmp_path / "comfy" / "ComfyUI")
    older = checkout(tmp_path / "comfy" / "ComfyUI-0.16.4")
    (tmp_path / "comfy" / "ComfyUI-notes").mkdir()
    assert found(home=tmp_path) == [newest, older]


def test_the_variable_goes_first_and_may_name_several(tmp_path: Path) -> None:
    checkout(tmp_path / "comfy" / "ComfyUI")
    one, two = checkout(tmp_path / "one"), checkout(tmp_path / "with space")
    assert found(home=tmp_path, comfyui=f"{one}:{two}:{one}/") == [one, two]


def test_an_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    host = checkout(tmp_path / "comfy" / "ComfyUI")
    assert found(home=tmp_path, comfyui="") == [host]


def test_a_wrong_path_is_an_error_and_no_skip(tmp_path: Path) -> None:
    for script in ("hosts", "host-tests"):
        result = run(script, home=tmp_path, comfyui=str(tmp_path / "absent"))
        assert result.returncode != 0
        assert str(tmp_path / "absent") in result.stderr
        assert "SKIPPED" not in result.stdout


def test_pack_inside_custom_nodes_finds_the_checkout_above(tmp_path: Path) -> None:
    host = checkout(tmp_path / "ComfyUI")
    scripts = host / "custom_nodes" / "ComfyUI-Carnator" / ".ci"
    shutil.copytree(ROOT / ".ci", scripts)
    assert found(home=tmp_path) == []
    result = run(scripts / "hosts", home=tmp_path)
    assert result.stdout.splitlines() == [str(host)]


def test_without_a_checkout_the_skip_is_loud_and_no_failure(tmp_path: Path) -> None:
    result = run("host-tests", home=tmp_path)
    assert result.returncode == 0
    assert "HOST TESTS SKIPPED" in result.stdout
    assert "COMFYUI_PATH=" in result.stdout


FAKE_PYTHON = """#!/usr/bin/env bash
# Stands in for an interpreter: makes "environments" that are copies of itself, notes what pip is
# told, and leaves the hashing of requirements to the real one.
case "$1 ${2:-}" in
    "-c "*) ;;
    "--version "*) echo Python 3.11.0 ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
    "-m pip") echo "${@: -2}" >>"$PIP_LOG" && exit "$PIP_EXIT" ;;
    "- "*) exec REAL "$@" ;;
    *) exit 99 ;;
esac
"""


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """Variables under which .ci/env builds with the stand-in, below tmp_path."""
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.replace("REAL", f'"{sys.executable}"'))
    python.chmod(0o755)
    return {
        "CARNATOR_PYTHON": str(python),
        "CARNATOR_ENVS": str(tmp_path / "envs"),
        "PIP_LOG": str(tmp_path / "pip.log"),
        "PIP_EXIT": "0",
    }


def test_env_refuses_what_it_cannot_build(tmp_path: Path, fake: dict[str, str]) -> None:
    cases = [
        (["other"], "unknown kind 'other'"),
        (["dev", "x"], "takes no further argument"),
        (["host", str(tmp_path)], "is no ComfyUI checkout"),
        (["host"], "found no ComfyUI checkout"),
    ]
    for arguments, message in cases:
        result = run("env", *arguments, home=tmp_path, **fake)
        assert result.returncode != 0
        assert result.stdout == ""
        assert message in result.stderr
    result = run("env", "dev", home=tmp_path, **fake | {"CARNATOR_PYTHON": "/absent/python"})
    assert result.returncode != 0 and "/absent/python" in result.stderr
    assert not (tmp_path / "envs").exists()


def test_env_builds_once_and_prints_the_path_alone(tmp_path: Path, fake: dict[str, str]) -> None:
    first = run("env", "dev", home=tmp_path, **fake)
    assert first.returncode == 0, first.stderr
    (path,) = first.stdout.splitlines()
    assert Path(path).parent == (tmp_path / "envs").resolve()
    assert run("env", "dev", home=tmp_path, **fake).stdout == first.stdout
    assert Path(fake["PIP_LOG"]).read_text().splitlines() == ["-r requirements-dev.txt"]

    assert run("env", "--remove", home=tmp_path, **fake).returncode == 0
    assert not Path(path).exists()


def test_env_never_hands_out_an_unfinished_build(tmp_path: Path, fake: dict[str, str]) -> None:
    failed = run("env", "demo", home=tmp_path, **fake | {"PIP_EXIT": "1"})
    assert failed.returncode != 0 and failed.stdout == ""
    (half,) = (tmp_path / "envs").glob("demo-*/")
    left_over = half / "left-over"
    left_over.touch()
    again = run("env", "demo", home=tmp_path, **fake)
    assert again.stdout.strip() == str(half.resolve())
    assert not left_over.exists()


def test_host_env_follows_the_newest_checkout(tmp_path: Path, fake: dict[str, str]) -> None:
    """ComfyUI's versions compare as numbers: 0.33.0 is newer than 0.4.0 and than 0.16.4."""
    paths = {}
    for version in ("0.16.4", "0.33.0", "0.4.0"):
        host = checkout(tmp_path / "comfy" / f"ComfyUI-{version}")
        (host / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
        (host / "requirements.txt").write_text(f"torch\npackage=={version}\n")
        paths[version] = run("env", "host", str(host), home=tmp_path, **fake).stdout
    assert len(set(paths.values())) == 3
    assert run("env", "host", home=tmp_path, **fake).stdout == paths["0.33.0"]

    newest = tmp_path / "comfy" / "ComfyUI-0.33.0" / "requirements.txt"
    newest.write_text("# a comment\n\n" + newest.read_text())
    assert run("env", "host", home=tmp_path, **fake).stdout == paths["0.33.0"]
    newest.write_text(newest.read_text() + "another\n")
    assert run("env", "host", home=tmp_path, **fake).stdout not in paths.values()
