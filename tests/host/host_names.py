"""Every name of the host that the pack's code uses, read from its syntax: imports, attributes of
imported modules, and calls with their keywords."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT

HOST_MODULES = {
    "comfy",
    "comfy_api",
    "comfy_execution",
    "comfy_extras",
    "execution",
    "folder_paths",
    "latent_preview",
    "node_helpers",
    "server",
}


@dataclass(frozen=True)
class Use:
    """A dotted name with where it stands; ``keywords`` and ``positional`` of a call, None for a
    name that is not called. A use is ``optional`` where a failed import of it is caught."""

    name: str
    where: str
    optional: bool
    keywords: tuple[str, ...] | None = None
    positional: int = 0


def guarded(tree: ast.Module) -> set[int]:
    """Lines inside a ``try`` that catches a missing name."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = " ".join(ast.unparse(h.type) if h.type else "Exception" for h in node.handlers)
            if any(kind in caught for kind in ("ImportError", "AttributeError", "Exception")):
                for item in node.body:
                    lines.update(range(item.lineno, (item.end_lineno or item.lineno) + 1))
    return lines


def chain(node: ast.expr, bound: dict[str, str]) -> str:
    """The full dotted name of an expression that starts at something of the host, or empty."""
    if isinstance(node, ast.Attribute):
        before = chain(node.value, bound)
        return f"{before}.{node.attr}" if before else ""
    return bound.get(node.id, "") if isinstance(node, ast.Name) else ""


def _of_host(module: str | None) -> bool:
    return (module or "").split(".")[0] in HOST_MODULES


def uses_in(text: str, where: str) -> Iterator[Use]:
    tree = ast.parse(text)
    soft, bound, spare = guarded(tree), {}, set()  # spare: full names with a fallback
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _of_host(alias.name):
                    bound[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
                    yield Use(alias.name, f"{where}:{node.lineno}", node.lineno in soft)
        elif isinstance(node, ast.ImportFrom) and not node.level and _of_host(node.module):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = name
                if node.lineno in soft:
                    spare.add(name)
                yield Use(name, f"{where}:{node.lineno}", node.lineno in soft)

    def caught(name: str, node: ast.expr) -> bool:
        inside = any(name == own or name.startswith(f"{own}.") for own in spare)
        return inside or node.lineno in soft

    called = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := chain(node.func, bound)):
            called.add(id(node.func))
            words = tuple(k.arg for k in node.keywords if k.arg)
            stars = any(isinstance(a, ast.Starred) for a in node.args)
            given = 0 if stars else len(node.args)
            yield Use(name, f"{where}:{node.lineno}", caught(name, node), words, given)
    for node in ast.walk(tree):
        if id(node) in called or not isinstance(node, ast.Attribute):
            continue
        if name := chain(node, bound):
            yield Use(name, f"{where}:{node.lineno}", caught(name, node))


def uses() -> list[Use]:
    """Of the pack's nodes and its entry point."""
    files = [ROOT / "__init__.py", *sorted((ROOT / "nodes").glob("*.py"))]
    return [use for file in files for use in uses_in(file.read_text(), _place(file))]


def _place(file: Path) -> str:
    return str(file.relative_to(ROOT))
