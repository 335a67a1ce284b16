"""What a sampler run of the host asks for, as the engine's ``Request``. Reads only, never patches.

Two kinds of keys. *Hard* ones must be equal for one run to be a donor to another; *soft* ones are
judged by the model's own output. All of them equal is the same request, so whatever cannot be
read makes a request unlike any other (soft) or keeps it from reuse (hard).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

import comfy.k_diffusion.sampling
import comfy.samplers
import torch
from comfy.extra_samplers import uni_pc
from torch import Tensor

from ..carnator import backbones
from ..carnator.request import Request
from .fingerprint import Digest, digest
from .guidance import KEY, guidance_scale

TEXT = (
    "cross_attn",
    "pooled_output",
    "attention_mask",
    "conditioning_",
    "t5xxl_",
    "text_",
    "lyrics",
)
NONCE = " once "
DROPPED = "uuid"  # new for every guider
OWN_OPTIONS = ("wrappers", "callbacks", "sample_sigmas")  # told apart below, or known otherwise
LOADED = "to_load_options"  # the host's own working copy
SIGMA_TOLERANCE = 1e-4


class Unsupported(Exception):
    """This run cannot be reused; the message says why, as the end of a sentence."""


def read_request(
    guider: Any,
    noise: Tensor,
    latent_image: Tensor,
    sampler: Any,
    sigmas: Tensor,
    denoise_mask: Tensor | None,
    seed: int | None,
    latent_shapes: Any = None,
) -> Request:
    """The request of one run, at the moment the host's ``OUTER_SAMPLE`` is called.

    Raises Unsupported with the reason when the run has to be left alone.
    """
    refuse(guider, noise, latent_shapes)
    patcher = guider.model_patcher
    name = sampler_name(sampler)
    schedule = tuple(sigmas.tolist())
    conds: Mapping[str, list[dict]] = guider.conds
    others = content(foreign_options(guider))
    shape = tuple(noise.shape)
    family = type(patcher.model.model_config).__name__
    scale = guidance_scale(guider)
    hard = {
        "backbone": family,
        "latent": f"{list(shape)} {type(patcher.get_model_object('latent_format')).__name__}",
        "prediction": " ".join(c.__name__ for c in type(model_sampling(patcher)).__mro__),
        "initial": initial_state(latent_image, denoise_mask),
        "conditioning": conditioning(conds),
        "stage": stage(patcher, schedule),
        "noise": digest(noise),
        "company": company(guider),
        "options": _readable(others),
    }
    options = dict(getattr(sampler, "extra_options", {}))
    numbers = {k: float(v) for k, v in options.items() if isinstance(v, int | float)}
    inpaint = getattr(sampler, "inpaint_options", {})
    guidance = {k: v for k, v in vars(guider).items() if isinstance(v, int | float | str)}
    soft = {
        "prompt": text([conds.get("positive", [])]),
        "negative": text([v for k, v in sorted(conds.items()) if k != "positive"]),
        "weights": weights(patcher),
        "patches": patches(patcher),
        "options": others,
        "cfg": content([type(guider).__qualname__, guidance]),
        "sampler": content([name, options, inpaint]),
        "schedule": digest(list(schedule)),
    }
    return Request(
        hard=hard,
        soft=soft,
        architecture=architecture(patcher),
        sampler=name,
        sigmas=schedule,
        cfg=1.0 if scale is None else scale,
        seed=int(seed or 0),
        labels={"model": model_file(patcher) or family, "sampler": name},
        sampler_options=numbers,
    )


def refuse(guider: Any, noise: Tensor, latent_shapes: Any) -> None:
    """Raise Unsupported for what the method does not cover."""
    if getattr(noise, "is_nested", False) or len(latent_shapes or ()) > 1:
        raise Unsupported("the latent is a pack of several (audio and video)")
    if noise.ndim not in (4, 5):
        raise Unsupported(f"the latent has {noise.ndim} dimensions, not those of images or video")
    if noise.shape[0] != 1:
        raise Unsupported(f"it is a batch of {noise.shape[0]}; only single latents are reused")
    options = guider.model_options
    if options.get("context_handler") is not None:
        raise Unsupported("context windows are in use")
    if options.get("multigpu_clones") or guider.model_patcher.additional_models.get("multigpu"):
        raise Unsupported("the work is split over several GPUs")
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


def model_sampling(patcher: Any) -> Any:
    return patcher.get_model_object("model_sampling")


def full_start(patcher: Any, first_sigma: float) -> bool:
    """True when a schedule starts from pure noise."""
    return first_sigma >= float(model_sampling(patcher).sigma_max) * (1 - SIGMA_TOLERANCE)


def stage(patcher: Any, sigmas: tuple[float, ...]) -> str:
    """Which part of a whole schedule a run covers: donors must cover the same one."""
    start = "noise" if full_start(patcher, sigmas[0]) else f"{sigmas[0]:.4f}"
    return f"{start} to {sigmas[-1]:.4f}"


def initial_state(latent_image: Tensor, mask: Tensor | None) -> str:
    """Hash of what the run starts from besides noise; ``empty`` for text to image or video."""
    if mask is None and torch.count_nonzero(latent_image) == 0:
        return "empty"
    return digest(latent_image, mask)


def conditioning(conds: Mapping[str, list[dict]]) -> str:
    """Hash of every condition that is not text: images, masks, areas, ranges, strengths. So is
    text that counts in a part of the run only, since the first evaluation cannot judge it."""
    held = {
        name: [
            {k: v for k, v in e.items() if k != DROPPED and (partial(e) or not is_text(k))}
            for e in entries
        ]
        for name, entries in conds.items()
    }
    try:
        return digest(held)
    except ValueError as error:
        raise Unsupported(f"its conditioning cannot be compared ({error})") from error


def partial(entry: Mapping[str, Any]) -> bool:
    """True for a conditioning that need not take part in every evaluation of a run."""
    starts = [entry.get(name) or 0.0 for name in ("start_percent", "clip_start_percent")]
    ends = [entry.get(name, 1.0) for name in ("end_percent", "clip_end_percent")]
    return max(starts) > 0 or min(ends) < 1 or bool(entry.get("default"))


def text(groups: list[list[dict]]) -> str:
    """Hash of the text embeddings of some groups of conditionings."""
    return content(
        [[{k: v for k, v in e.items() if is_text(k)} for e in entries] for entries in groups]
    )


def is_text(name: str) -> bool:
    """True for what text encoders put into a conditioning, here or for other model families."""
    return name.startswith(TEXT)


def content(value: Any, sampled: bool = False) -> str:
    """Hash of a soft key. What cannot be read makes it unlike any other, now and later."""
    result = Digest(sampled).add(value)
    return result.hex + nonce() if result.opaque else result.hex


def nonce() -> str:
    """What makes a soft key equal to none, not even to itself a second time."""
    return NONCE + uuid.uuid4().hex


def differences(one: Request, other: Request) -> list[str]:
    """Names of what differs between two requests. Unreadable parts are taken on trust, and so is
    the inner state of other packs' options, which changes as they run."""
    names = []
    for mine, theirs in ((one.hard, other.hard), (one.soft, other.soft)):
        keys = sorted({*mine, *theirs} - {"options"})
        names += [k for k in keys if _readable(mine.get(k)) != _readable(theirs.get(k))]
    if one.architecture != other.architecture:
        names.insert(0, "model")
    return [*names, "seed"] if one.seed != other.seed else names


def _readable(value: str | None) -> str:
    return (value or "").rsplit(NONCE, 1)[0]


def architecture(patcher: Any) -> str:
    """Hash of the names and shapes of the diffusion model's weights; reads no weight."""
    model = patcher.model.diffusion_model
    return backbones.architecture((n, tuple(p.shape)) for n, p in model.named_parameters())


def model_file(patcher: Any) -> str | None:
    """File name the model was loaded from, where the loader left it."""
    origin = getattr(patcher, "cached_patcher_init", None)
    path = origin[1][0] if origin and origin[1] else None
    return os.path.basename(path) if isinstance(path, str) else None


def weights(patcher: Any) -> str:
    """Which weights these are, without reading them: file, size, time, type in memory."""
    name = model_file(patcher)
    if name is None:
        return f"unknown{nonce()}"
    try:
        found = os.stat(patcher.cached_patcher_init[1][0])
    except OSError:  # moved away since it was loaded
        return f"unknown{nonce()}"
    return digest([name, found.st_size, found.st_mtime_ns, str(patcher.model_dtype())])


def patches(patcher: Any) -> str:
    """Hash of everything laid over the weights: LoRAs (key, strength, sampled values) and more."""
    return content(
        [
            patcher.patches,
            getattr(patcher, "weight_wrapper_patches", {}),
            patcher.object_patches,
            sorted(patcher.injections),
            patcher.hook_patches,
        ],
        sampled=True,
    )


def company(guider: Any) -> str:
    """Names of what other nodes put on the model: wrappers and options change what an evaluation
    is, so runs with and without them are no donors to each other. Nor are runs with other values
    of them (the key ``options``): many act only later than the first evaluation."""
    options = guider.model_options
    inner = options.get("transformer_options", {})
    wrappers = inner.get("wrappers", {})
    names = {f"{kind}:{key}" for kind in wrappers for key in wrappers[kind] if key != KEY}
    names |= {k for k, v in options.items() if v and k not in ("transformer_options", LOADED)}
    names |= {k for k, v in inner.items() if v and k not in OWN_OPTIONS}
    return " ".join(sorted(names))


def foreign_options(guider: Any) -> list[Any]:
    """Every other option that may change the model's output."""
    options = dict(guider.model_options)
    inner = dict(options.pop("transformer_options", {}))
    options.pop(LOADED, None)
    wrappers = {
        kind: {key: value for key, value in keyed.items() if key != KEY}
        for kind, keyed in inner.get("wrappers", {}).items()
    }
    kept = {k: v for k, v in inner.items() if k not in OWN_OPTIONS}
    return [options, kept, {k: v for k, v in wrappers.items() if v}]
