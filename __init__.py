"""ComfyUI-Carnator: differential trajectory reuse between the generations of one creator.

Importing this package outside ComfyUI is harmless; the nodes are loaded when the host asks.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]

WEB_DIRECTORY = "./web"  # what the editor loads: the text of Carnator Report


async def comfy_entrypoint() -> Any:
    """The host's entry point: an extension that lists the nodes."""
    from .nodes import CarnatorExtension

    return CarnatorExtension()
