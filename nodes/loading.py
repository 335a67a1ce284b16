"""Loading the pack's parts one by one, so that what a host lacks costs the part that needs it.

ComfyUI's modules move and grow. A name that is missing must not take every node of the pack out of
a user's graphs; the rest loads, and one line in the log says what is gone and why.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import Any

log = logging.getLogger("carnator")
TESTED = "0.16.4"  # the oldest ComfyUI the pack is tested with; pyproject.toml promises the same


def module(name: str, what: str) -> ModuleType | None:
    """A module of this package by its relative name, or None and one line in the log.

    ``what`` names for the user what is missing then.
    """
    try:
        return importlib.import_module(f".{name}", __package__)
    except (ImportError, AttributeError) as error:  # TypeError would be a fault of our own
        log.warning(
            "[Carnator] without %s: this ComfyUI has not all they need (%s: %s). The pack is "
            "tested with ComfyUI %s and newer.",
            what,
            type(error).__name__,
            error,
            TESTED,
        )
        return None


def classes(name: str, what: str, *wanted: str) -> list[type[Any]]:
    """Node classes of one of the package's modules; none where it cannot be loaded."""
    found = module(name, what)
    return [] if found is None else [getattr(found, kind) for kind in wanted]
