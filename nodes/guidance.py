"""How a guider joins its branches, and whether each can be told apart. Reads only."""

from __future__ import annotations

from typing import Any

import comfy.patcher_extension
import comfy.samplers

from .weights import compiled

KEY = "carnator"  # of all of Carnator's wrappers
PREDICT = comfy.patcher_extension.WrappersMP.PREDICT_NOISE


def standard_guidance(guider: Any) -> bool:
    """True when the guider joins its branches as the host's own CFGGuider does."""
    return type(guider).predict_noise is comfy.samplers.CFGGuider.predict_noise


def guidance_scale(guider: Any) -> float | None:
    """The guider's CFG scale; None when it joins its branches in a way of its own."""
    cfg = getattr(guider, "cfg", None)
    return float(cfg) if standard_guidance(guider) and isinstance(cfg, int | float) else None


def observed_scale(guider: Any) -> float | None:
    """The CFG scale under which both branches explain every evaluation of a run; None where other
    nodes may change guidance at some of its steps, for a record must be of one kind."""
    options = guider.model_options
    functions = ("sampler_cfg_function", "sampler_post_cfg_function", "sampler_pre_cfg_function")
    wrappers = options.get("transformer_options", {}).get("wrappers", {}).get(PREDICT, {})
    if any(options.get(name) for name in functions) or any(k != KEY for k in wrappers):
        return None
    return guidance_scale(guider)


def attention_visible(guider: Any) -> bool:
    """Whether the self-attention of an evaluation can be watched. A compiled model would keep the
    observer in its graph: it would be called in every later run, and hold on to what it sees."""
    wrappers = guider.model_options.get("transformer_options", {}).get("wrappers", {})
    return not compiled(guider.model_patcher, wrappers)
