"""The pack's metadata: what ComfyUI, its Manager and its registry read, and the pins of our own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def requirements(name: str) -> dict[str, str]:
    """Distribution -> version specifier, of the file's own lines (`-r` not followed)."""
    lines = (line.split("#")[0].strip() for line in read(name).splitlines())
    return dict(split_requirement(line) for line in lines if line and not line.startswith("-"))


def split_requirement(line: str) -> tuple[str, str]:
    match = re.fullmatch(r"([A-Za-z0-9._-]+)\s*(.*)", line)
    assert match, f"not a plain requirement: {line!r}"
    return match.group(1).lower(), match.group(2).replace(" ", "")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


def test_both_lists_of_requirements_agree(project: dict[str, Any]) -> None:
    declared = dict(split_requirement(line) for line in project["project"]["dependencies"])
    assert requirements("requirements.txt") == declared
    assert not {"torch", "torchvision", "torchaudio"} & set(declared), "PyTorch is the host's"


def test_development_and_demo_use_one_pinned_torch() -> None:
    torch = requirements("requirements-dev.txt")["torch"]
    assert requirements("requirements-demo.txt") == {"torch": torch}
    for name in ("requirements-dev.txt", "requirements-demo.txt"):
        assert "-r requirements.txt" in read(name).splitlines()
        assert all(spec.startswith("==") for spec in requirements(name).values())


def test_the_registry_accepts_the_metadata(project: dict[str, Any]) -> None:
    data, comfy = project["project"], project["tool"]["comfy"]
    assert re.fullmatch(r"[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*", data["name"])
    assert "comfy" not in data["name"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", data["version"])
    assert (ROOT / data["license"]["file"]).is_file()
    assert data["urls"]["Repository"].startswith("https://")
    assert "Operating System :: OS Independent" in data["classifiers"]
    accelerators = [c for c in data["classifiers"] if c.startswith("Environment :: ")]
    allowed = {"NVIDIA CUDA", "AMD ROCm", "Intel Arc", "Apple Metal"}
    assert {name.removeprefix("Environment :: GPU :: ") for name in accelerators} <= allowed
    assert comfy["PublisherId"] and comfy["DisplayName"]
    assert re.fullmatch(r">=\d+\.\d+\.\d+", comfy["requires-comfyui"])


def test_changelog_opens_with_this_version(project: dict[str, Any]) -> None:
    headings = re.findall(r"^## (\d+\.\d+\.\d+)\b", read("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == project["project"]["version"]


def test_oldest_host_is_the_one_that_the_workflow_tests(project: dict[str, Any]) -> None:
    oldest = project["tool"]["comfy"]["requires-comfyui"].removeprefix(">=")
    assert f'"v{oldest}"' in read(".github/workflows/tests.yml")


def test_the_archive_keeps_what_the_pack_needs() -> None:
    left_out = {line.strip("/") for line in read(".comfyignore").splitlines()}
    needed = {"__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "README.md"}
    needed |= {"carnator", "nodes", "web", "locales", "workflows"}
    assert not left_out & needed
    assert {"tests", "benchmarks", ".ci"} <= left_out
