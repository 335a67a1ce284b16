"""The repository's own rules: what its code may import and call, what its files may hold.

Each rule is a function from text to complaints. It is tried on a text that breaks it, so that a
rule that finds nothing is known to be able to, and then on every file it covers.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SKIPPED_FOLDERS = {
    ".git",
    "__pycache__",
    "build",
    "dist",
    "venv",
    ".venv",
    "out",
    "demo-out",
    "training",
}
SOURCE_LINES, TEST_LINES = 300, 400
FILE_BYTES = 12 * 2**20

HOST_MODULES = {
    "comfy", "comfy_api", "comfy_config", "comfy_execution", "comfy_extras", "execution",
    "folder_paths", "latent_preview", "node_helpers", "nodes", "server",
}  # fmt: skip
# Module name -> distribution, where they differ.
DISTRIBUTIONS = {"PIL": "pillow"}
# Present wherever the nodes run, since ComfyUI requires them.
HOST_SUPPLIED = {"torch", "aiohttp", "psutil"}
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "pickletools", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "os.system", "os.popen"}


def repo_files() -> list[Path]:
    """Files of the checkout, relative to its root: tracked or not, without the ignored ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        found = [Path(name) for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive, or no git
        found = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
    return sorted(
        path
        for path in set(found)
        if not SKIPPED_FOLDERS & set(path.parts)
        and not any(part.endswith("_cache") or part == ".hypothesis" for part in path.parts)
        and (ROOT / path).is_file()
    )


FILES = repo_files()


def sources(*tops: str) -> list[Path]:
    """Python files below the given top folders; "." stands for the root's own files."""
    return [
        path
        for path in FILES
        if path.suffix == ".py" and (path.parts[0] if len(path.parts) > 1 else ".") in tops
    ]


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


# --- the rules ---------------------------------------------------------------------------------


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of each import, at any depth; relative ones are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe(text: str, path: Path) -> list[str]:
    """Pickle in any form, and code run from strings."""
    tree = parsed(text)
    found = [
        f"line {line}: imports {name}"
        for line, name in imported(tree)
        if name.split(".")[0] in UNSAFE_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if dotted(node.func) in UNSAFE_CALLS:
                found.append(f"line {node.lineno}: calls {dotted(node.func)}")
            for keyword in node.keywords:
                plain = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "allow_pickle" and not plain:
                    found.append(f"line {node.lineno}: allow_pickle is not False")
    return found


def host_imports(text: str, path: Path) -> list[str]:
    """Imports of ComfyUI's modules, and relative ones that leave carnator/."""
    tree = parsed(text)
    found = [
        f"line {line}: imports {name}"
        for line, name in imported(tree)
        if name.split(".")[0] in HOST_MODULES
    ]
    depth = len(path.parts) - 1  # folders between the root and the file
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level > depth:
            found.append(f"line {node.lineno}: a relative import leaves {path.parts[0]}/")
    return found


def absolute_own_imports(text: str, path: Path) -> list[str]:
    """`import carnator`: within ComfyUI no such top-level module exists, only relative works."""
    return [
        f"line {line}: imports {name}; write it as a relative import"
        for line, name in imported(parsed(text))
        if name.split(".")[0] in {"carnator", "nodes"}
    ]


def undeclared(text: str, path: Path) -> list[str]:
    """Third-party imports that requirements.txt does not bring."""
    listed = re.findall(r"^[A-Za-z0-9._-]+", read(Path("requirements.txt")), re.MULTILINE)
    known = {name.lower() for name in listed} | HOST_SUPPLIED | HOST_MODULES
    return [
        f"line {line}: imports {name}"
        for line, name in imported(parsed(text))
        if (top := name.split(".")[0]) not in sys.stdlib_module_names
        and DISTRIBUTIONS.get(top, top).lower() not in known
    ]


def early_model_imports(text: str, path: Path) -> list[str]:
    """`comfy.ldm` at the top of a module: a name removed there would stop the whole pack."""
    return [
        f"line {node.lineno}: imports comfy.ldm at the top"
        for node in parsed(text).body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "comfy.ldm" in ast.unparse(node)
    ]


def too_long(text: str, path: Path) -> list[str]:
    lines, most = text.count("\n"), TEST_LINES if path.name.startswith("test_") else SOURCE_LINES
    return [f"{lines} lines, more than {most}"] if lines > most else []


def machine_paths(text: str, path: Path) -> list[str]:
    """Absolute paths into somebody's machine. Spelt apart here, or this file would break it."""
    pattern = (
        r"(?<![\w.~$}/-])/(?:root|home/\w+|Users/\w+|work|mnt/\w+)(?=/|\b)(?![\w-])"
        r"|\b[A-Z]:[\\/]+Users\b"
    )
    return [
        f"line {number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        if (match := re.search(pattern, line))
    ]


Rule = Callable[[str, Path], list[str]]
CODE = ("carnator", "nodes", "benchmarks", ".")
RULES: list[tuple[Rule, list[Path]]] = [
    (unsafe, sources(*CODE)),
    (host_imports, sources("carnator")),
    (absolute_own_imports, sources("carnator", "nodes", ".")),
    (undeclared, sources("carnator", "nodes", ".")),
    (early_model_imports, sources("nodes", ".")),
    (too_long, [*sources(*CODE, "tests"), *(p for p in FILES if p.suffix in {".js", ".css"})]),
    (
        machine_paths,
        [
            path
            for path in FILES
            if path.suffix
            in {".py", ".md", ".toml", ".txt", ".yml", ".json", ".js", ".css", ".html", ""}
        ],
    ),
]
BROKEN = [
    (unsafe, "import pickle"),
    (unsafe, "def f():\n    from shelve import open"),
    (unsafe, "import torch\ntorch.load('x')"),
    (unsafe, "eval('1')"),
    (unsafe, "np.load('x', allow_pickle=True)"),
    (host_imports, "import comfy.samplers"),
    (host_imports, "def f():\n    from comfy_api.latest import io"),
    (host_imports, "from ...nodes import host"),
    (absolute_own_imports, "from carnator.engine import Run"),
    (undeclared, "import pandas.io"),
    (early_model_imports, "from comfy.ldm.wan import model"),
    (too_long, "\n" * (SOURCE_LINES + 1)),
    (machine_paths, "see /" + "root/.cache"),
    (machine_paths, "open('/" + "home/someone/x')"),
    (machine_paths, "C:\\" + "Users\\someone"),
]
SOUND = [
    (unsafe, "import json\nmodel.eval()\nnp.load('x', allow_pickle=False)"),
    (host_imports, "from .. import derivative"),
    (absolute_own_imports, "from ..carnator import engine\nfrom . import host"),
    (undeclared, "import PIL.Image, torch, json, comfy.samplers\nfrom . import x"),
    (early_model_imports, "def f():\n    import comfy.ldm.wan.model"),
    (machine_paths, "~/comfy, $HOME/x, a/root/b, https://example.org/work/x, /workflows"),
]


@pytest.mark.parametrize(("rule", "text"), BROKEN)
def test_a_rule_finds_its_breach(rule: Rule, text: str) -> None:
    assert rule(text, Path("carnator/store/sample.py"))


@pytest.mark.parametrize(("rule", "text"), SOUND)
def test_a_rule_leaves_sound_text_alone(rule: Rule, text: str) -> None:
    assert not rule(text, Path("carnator/store/sample.py"))


@pytest.mark.parametrize(("rule", "paths"), RULES, ids=lambda item: getattr(item, "__name__", ""))
def test_the_tree_keeps_the_rule(rule: Rule, paths: list[Path]) -> None:
    assert paths, "the rule covers no file: its list of folders is out of date"
    complaints = [f"{path}: {found}" for path in paths for found in rule(read(path), path)]
    assert not complaints, "\n".join(complaints)


# --- files -------------------------------------------------------------------------------------


def test_json_files_parse() -> None:
    for path in FILES:
        if path.suffix == ".json":
            json.loads(read(path))


def test_no_file_is_too_big_for_a_pack() -> None:
    big = [str(path) for path in FILES if (ROOT / path).stat().st_size > FILE_BYTES]
    assert not big
