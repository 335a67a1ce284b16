"""Every node of the host that takes a model and gives one, with Carnator before and after it."""

from __future__ import annotations

from typing import Any

import pytest
from trial import attach, tried

HIT = ["miss", "hit", "exact"]
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
    "WanContextWindowsManual": (
        {
            "context_length": 5,
            "context_overlap": 4,
            "context_schedule": "standard_static",
            "context_stride": 1,
            "closed_loop": False,
            "fuse_method": "pyramid",
            "freenoise": False,
        },
        DENSE,
    ),
    "wanBlockSwap": ({}, HIT),
}

# Nodes that cannot act on the tiny Wan, and where they are tried instead, if anywhere.
ELSEWHERE = {
    "AnimaLLLiteApply": "needs a patch file for Anima",
    "ARVideoI2V": "a causal model with a sampler of its own",
    "ChromaRadianceOptions": "Chroma Radiance alone",
    "FluxKVCache": "Flux alone",
    "FreeU": "U-Nets alone",
    "FreeU_V2": "U-Nets alone",
    "HiDreamO1PatchSeamSmoothing": "HiDream alone",
    "HypernetworkLoader": "U-Nets alone",
    "HyperTile": "U-Nets alone",
    "LatentApplyOperationCFG": "needs an operation from another node: test_late_guidance",
    "LoraLoader": "test_weights",
    "LoraLoaderBypass": "test_weights",
    "LoraLoaderBypassModelOnly": "test_weights",
    "LoraLoaderModelOnly": "test_weights",
    "LoraModelLoader": "test_weights",
    "LTXVContextWindows": "as WanContextWindowsManual, for LTX-Video",
    "LTXVModalityGuidance": "audio-video models, which run dense",
    "LTXVReferenceAudio": "audio-video models, which run dense",
    "LTXVSpatioTemporalGuidance": "LTX-Video: test_families",
    "MiniMaxH3SigmaShift": "MiniMax H3, which runs dense",
    "ModelMergeAdd": "test_weights",
    "ModelMergeBlocks": "U-Nets alone",
    "ModelMergeSimple": "test_weights",
    "ModelMergeSubtract": "test_weights",
    "ModelSamplingAuraFlow": "as ModelSamplingSD3",
    "ModelSamplingContinuousEDM": "models of noise prediction",
    "ModelSamplingContinuousV": "models of v prediction",
    "ModelSamplingDiscrete": "models of noise prediction",
    "ModelSamplingFlux": "as ModelSamplingSD3, with the latent's size",
    "ModelSamplingLTXV": "as ModelSamplingSD3, with the latent's size",
    "ModelSamplingStableCascade": "Stable Cascade alone",
    "MultiGPU_WorkUnits": "test_threads",
    "PatchModelAddDownscale": "U-Nets alone",
    "PerpNeg": "replaced by the guider of the same name",
    "QwenImageDiffsynthControlnet": "Qwen Image alone",
    "RenormCFG": "Lumina alone",
    "SelectModelDevice": "moves the model; with one device it is the model itself",
    "SelfAttentionGuidance": "U-Nets alone",
    "SkipLayerGuidanceSD3": "SD3 alone; the generic node is tried",
    "SUPIRApply": "SUPIR alone",
    "TomePatchModel": "U-Nets alone",
    "TorchCompileModel": "test_compile",
    "TripoSplatSamplingPreview": "TripoSplat alone",
    "UNetCrossAttentionMultiply": "U-Nets alone",
    "UNetSelfAttentionMultiply": "U-Nets alone",
    "UNetTemporalAttentionMultiply": "U-Nets alone",
    "USOStyleReference": "Flux alone",
    "WanAnimate2Cache": "Wan Animate alone",
    "WanInfiniteTalkToVideo": "needs speech",
    "WanUni3CControlnetApply": "needs a patch file",
    "ZImageFunControlnet": "needs a patch file",
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


def test_no_such_node_is_forgotten(registry):
    """A node that a new version of the host brings has to be looked at."""
    found = set()
    for name, node in registry.items():
        inputs = node.INPUT_TYPES()
        given = [v for group in ("required", "optional") for v in inputs.get(group, {}).values()]
        if ("MODEL" in [v[0] for v in given]) and "MODEL" in node.RETURN_TYPES:
            found.add(name)
    own = {name for name in found if name.startswith("Carnator")}
    merges = {name for name in found if name.startswith("ModelMerge")}  # one for each family
    assert own and merges
    assert sorted(found - own - merges - set(PATCHES) - set(ELSEWHERE)) == []
