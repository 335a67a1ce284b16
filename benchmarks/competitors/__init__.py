"""Published ways of saving evaluations, each implemented from its rule, in one harness."""

from __future__ import annotations

from .base import Competitor, Outcome
from .cacheseek import CACHESEEK
from .case import Case, Path, Pool, paths
from .easycache import EASYCACHE
from .lazycache import LAZYCACHE
from .nirvana import NIRVANA
from .own import OWN
from .plain import PLAIN
from .redi import REDI
from .teacache import TEACACHE, fit
from .vllm_omni import VLLM_OMNI

COMPETITORS: tuple[Competitor, ...] = (
    PLAIN,
    OWN,
    EASYCACHE,
    LAZYCACHE,
    TEACACHE,
    NIRVANA,
    VLLM_OMNI,
    CACHESEEK,
    REDI,
)

__all__ = ["COMPETITORS", "Case", "Competitor", "Outcome", "Path", "Pool", "fit", "paths"]
