"""A guard against changes of the host: every name of it that the pack uses is there, and takes the
arguments it is given. ``.ci/import-guard`` asks the same of all its releases."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
from host_names import Use, uses, uses_in

USED = uses()


def resolved(name: str) -> Any:
    """The object of a dotted name. Raises AttributeError or ImportError where it is not there."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"there is no {name}")


def complaint(use: Use) -> str:
    """What is wrong with a use on this host, or empty."""
    try:
        found = resolved(use.name)
    except (AttributeError, ImportError) as error:
        return "" if use.optional else f"{use.where}: {use.name}: {error}"
    if use.keywords is None or not callable(found):
        return ""
    try:
        signature = inspect.signature(found)
    except ValueError:  # of a built-in
        return ""
    try:
        signature.bind_partial(*[None] * use.positional, **dict.fromkeys(use.keywords))
    except TypeError as error:
        return f"{use.where}: {use.name}: {error}"
    return ""


def test_every_name_is_there_and_takes_its_arguments():
    assert len(USED) > 100
    assert [text for use in USED if (text := complaint(use))] == []


@pytest.mark.parametrize(
    "text",
    [
        "import comfy.no_such_module",
        "from comfy.utils import no_such_name",
        "import comfy.utils\ncomfy.utils.no_such_name()",
        "from comfy_api.latest import io\nio.Schema(no_such_argument=1)",
        "from comfy_api.latest import io\nio.Float.Input('x', no_such_argument=1)",
    ],
)
def test_the_guard_finds_what_is_gone(text):
    assert any(complaint(use) for use in uses_in(text, "sample.py"))


def test_the_guard_lets_pass_what_is_caught():
    text = "try:\n    from comfy.utils import gone\nexcept ImportError:\n    gone = int\ngone.x(1)"
    assert not any(complaint(use) for use in uses_in(text, "sample.py"))
