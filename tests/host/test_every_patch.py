"""Every node of the host that takes a model and gives one, with Carnator before and after it."""

from __future__ import annotations

from typing import Any

import pytest
from trial import attach, tried

HIT = ["miss", "hit", "exact"]
SEEN = ["miss", "hit", "hit"]  # holds something unreadable: no request is known to be the same
DENSE = ["dense", "dense", "dense"]

# Node -> its settings and the decisions on a first run, a changed word, and the first run again.
PATCHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "APG": ({"eta": 1.0, "norm_threshold": 5.0, "momentum": 0.0}, HIT),
    "CFGNorm": ({"strength": 1.0}, HIT),
    "CFGZeroStar": ({}, HIT),
    "ContextWindowsManual": (
        {
            "context_length": 2,
            "context_overlap": 1,
            "context_schedule": "standard_static",
            "context_stride": 1,
            "closed_loop": False,
            "fuse_method": "pyramid",
            "dim": 2,
            "freenoise": False,
        },
        DENSE,
    ),
    "CFGOverride": ({"cfg": 4.0, "start_percent": 0.2, "end_percent": 0.6}, HIT),
    "DifferentialDiffusion": ({"strength": 1.0}, HIT),
    "EasyCache": (
        {"reuse_threshold": 0.2, "start_percent": 0.15, "end_percent": 0.95, "verbose": False},
        DENSE,
    ),
    "Epsilon Scaling": ({"scaling_factor": 1.01}, HIT),
    "FreSca": ({"scale_low": 1.0, "scale_high": 1.2, "freq_cutoff": 4}, HIT),
    "LazyCache": (
        {"reuse_threshold": 0.2, "start_percent": 0.15, "end_percent": 0.95, "verbose": False},
        DENSE,
    ),
    "Mahiro": ({}, HIT),
    "ModelAttentionBackend": ({"attention": "pytorch attention"}, HIT),
    "ModelComputeDtype": ({"dtype": "fp32"}, HIT),
    "ModelNoiseScale": ({"noise_scale": 1.0}, HIT),
    "ModelSamplingSD3": ({"shift": 3.0}, HIT),
    "NAGuidance": ({"nag_scale": 2.0, "nag_alpha": 0.5, "nag_tau": 1.5}, HIT),
    "PerturbedAttentionGuidance": ({"scale": 1.0}, HIT),
    "RescaleCFG": ({"multiplier": 0.7}, HIT),
    "ScaleROPE": (
        {f"{kind}_{axis}": v for axis in "xyt" for kind, v in (("scale", 1.5), ("shift", 0.0))},
        HIT,
    ),
    "SkipLayerGuidanceDiT": (
        {
            "double_layers": "1",
            "single_layers": "",
            "scale": 1.0,
            "start_percent": 0.0,
            "end_percent": 1.0,
            "rescaling_scale": 0.3,
        },
        HIT,
    ),
    "SkipLayerGuidanceDiTSimple": (
        {"double_layers": "1", "single_layers": "", "start_percent": 0.0, "end_percent": 1.0},
        HIT,
    ),
    "TCFG": ({}, HIT),
    "TemporalScoreRescaling": ({"tsr_k": 1.1, "tsr_sigma": 1.0}, HIT),
    "VideoLinearCFGGuidance": ({"min_cfg": 1.0}, HIT),
    "VideoTriangleCFGGuidance": ({"min_cfg": 1.0}, HIT),
    "wanBlockSwap": ({}, HIT),
}


def applied(registry: dict[str, Any], name: str, model: Any, given: dict[str, Any]) -> Any:
    """What a node of the host makes of a model."""
    node = registry[name]
    if hasattr(node, "GET_SCHEMA"):
        return node.execute(model=model, **given)[0]
    return getattr(node(), node.FUNCTION)(model=model, **given)[0]


@pytest.mark.parametrize("before", [False, True], ids=["after it", "before it"])
@pytest.mark.parametrize("name", PATCHES)
def test_beside_a_node_of_the_host(registry, small_model, store, name, before):
    if name not in registry:
        pytest.skip(f"this host has no {name}")
    given, expected = PATCHES[name]
    plain = applied(registry, name, small_model, given)
    if before:
        ours = applied(registry, name, attach(small_model, store), given)
    else:
        ours = attach(plain, store)
    assert tried(plain, ours, store) == expected
