"""The nodes: thin fronts of the engine for the host's graph. No algorithm lives here."""

from __future__ import annotations

import logging

from comfy_api.latest import ComfyExtension, io

from . import loading

log = logging.getLogger("carnator")
NODES: list[type[io.ComfyNode]] = [
    *loading.classes("accelerate", "Carnator Accelerate", "CarnatorAccelerate"),
    *loading.classes(
        "pipeline",
        "the nodes of the pipeline",
        "CarnatorProbe",
        "CarnatorSignatureMatch",
        "CarnatorReuseScope",
        "CarnatorSparseAttentionSampler",
    ),
    *loading.classes("store", "Carnator Store", "CarnatorStore"),
    *loading.classes("report", "Carnator Report", "CarnatorReport"),
    *loading.classes(
        "demo",
        "the nodes of the demo",
        "CarnatorLoadDemoModel",
        "CarnatorDemoCaption",
        "CarnatorDemoEmptyLatent",
        "CarnatorDemoDecode",
    ),
]


class CarnatorExtension(ComfyExtension):
    """What the host asks for the pack's nodes."""

    async def on_load(self) -> None:
        """The page's side: without it, reuse works as well."""
        routes = loading.module("routes", "the sidebar's routes")
        if routes is None:
            return
        try:
            routes.register()
        except Exception as error:
            log.warning("[Carnator] no sidebar (%s: %s)", type(error).__name__, error)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
