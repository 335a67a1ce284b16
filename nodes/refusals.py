"""Which runs are left alone, told before they start, and why. Reads only.

Every reason is the end of the sentence "this run is left alone: ...", for the log and the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.k_diffusion.sampling
import comfy.samplers
from torch import Tensor

try:
    from comfy.extra_samplers import uni_pc
except ImportError:  # a host that has moved it: its samplers are then not known as the host's own
    uni_pc = None

# Marks that caches of steps leave in a model's options, in the host and in common packs.
STEP_CACHES = (
    "easycache",
    "lazycache",
    "teacache",
    "rel_l1_thresh",
    "magcache",
    "fbcache",
    "first_block_cache",
    "dbcache",
    "cachedit",
    "cache_dit",
    "taylorseer",
    "spectrum",
)
READS_GUIDANCE = "the sampler reads the guidance branches of every step"


class Unsupported(Exception):
    """This run cannot be reused; the message says why, as the end of a sentence."""


def refuse(guider: Any, noise: Tensor, sigmas: Tensor, latent_shapes: Any) -> None:
    """Raise Unsupported for what the method does not cover."""
    if getattr(noise, "is_nested", False) or len(latent_shapes or ()) > 1:
        raise Unsupported("the latent is a pack of several (audio and video)")
    if noise.ndim not in (4, 5):
        raise Unsupported(f"the latent has {noise.ndim} dimensions, not those of images or video")
    if noise.shape[0] != 1:
        raise Unsupported(f"it is a batch of {noise.shape[0]}; only single latents are reused")
    if sigmas.ndim != 1 or sigmas.numel() < 2:
        raise Unsupported(f"its schedule, of shape {list(sigmas.shape)}, holds no step")
    options = guider.model_options
    if options.get("context_handler") is not None:
        raise Unsupported("context windows are in use")
    if options.get("multigpu_clones") or guider.model_patcher.additional_models.get("multigpu"):
        raise Unsupported("the work is split over several GPUs")
    for name in option_names(options):
        if any(mark in name.lower() for mark in STEP_CACHES):
            raise Unsupported(
                f"{name!r}, a cache of steps, is on the model, and each of the two would take the "
                "other's guesses for the model's answers"
            )
    for entries in guider.conds.values():
        for entry in entries:
            for name, words in (
                ("hooks", "its conditioning carries hooks"),
                ("control", "a ControlNet is attached"),
                ("gligen", "GLIGEN boxes are attached"),
            ):
                if entry.get(name) is not None:
                    raise Unsupported(words)
    if getattr(guider.model_patcher, "forced_hooks", None) is not None:
        raise Unsupported("the model carries hooks")


def option_names(options: dict[str, Any]) -> Iterator[str]:
    """Names under which nodes have put something on a model: options, and keys of wrappers."""
    inner = options.get("transformer_options", {})
    yield from (name for name in options if name != "transformer_options")
    yield from (name for name in inner if name != "wrappers")
    for keyed in inner.get("wrappers", {}).values():
        yield from (str(key) for key in keyed)


def sampler_name(sampler: Any) -> str:
    """The host's name of a sampler's function without ``sample_``, or Unsupported."""
    function = getattr(sampler, "sampler_function", None)
    name = getattr(function, "__name__", type(sampler).__name__)
    homes = (comfy.k_diffusion.sampling, uni_pc)
    if type(sampler) is not comfy.samplers.KSAMPLER:
        raise Unsupported(f"the sampler {name!r} is not one of the host's own")
    if name in ("dpm_fast_function", "dpm_adaptive_function"):
        raise Unsupported(f"the sampler {name[:-9]!r} chooses its own evaluations")
    if not any(getattr(home, name, None) is function for home in homes):
        raise Unsupported(f"the sampler {name!r} is not one of the host's own")
    return name.removeprefix("sample_")


def reads_guidance(guider: Any, options: dict[str, Any]) -> bool:
    """True when a sampler has put a post-CFG function of its own into the options of a call.

    It reads the guidance branches of every step there, which a predicted step does not have.
    """
    name = "sampler_post_cfg_function"
    return len(options.get(name) or ()) > len(guider.model_options.get(name) or ())
