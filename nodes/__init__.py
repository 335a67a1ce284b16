"""The nodes: thin fronts of the engine for the host's graph. No algorithm lives here."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .accelerate import CarnatorAccelerate
from .demo import (
    CarnatorDemoCaption,
    CarnatorDemoDecode,
    CarnatorDemoEmptyLatent,
    CarnatorLoadDemoModel,
)
from .pipeline import (
    CarnatorProbe,
    CarnatorReuseScope,
    CarnatorSignatureMatch,
    CarnatorSparseAttentionSampler,
)
from .report import CarnatorReport
from .store import CarnatorStore

NODES: list[type[io.ComfyNode]] = [
    CarnatorAccelerate,
    CarnatorProbe,
    CarnatorSignatureMatch,
    CarnatorReuseScope,
    CarnatorSparseAttentionSampler,
    CarnatorStore,
    CarnatorReport,
    CarnatorLoadDemoModel,
    CarnatorDemoCaption,
    CarnatorDemoEmptyLatent,
    CarnatorDemoDecode,
]


class CarnatorExtension(ComfyExtension):
    """What the host asks for the pack's nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
