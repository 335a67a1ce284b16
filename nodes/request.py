"""What a sampler run of the host asks for, as the engine's ``Request``. Reads only, never patches.

Two kinds of keys. *Hard* ones must be equal for one run to be a donor to another; *soft* ones are
judged by the model's own output. All of them equal is the same request, so whatever cannot be
read makes a request unlike any other (soft) or keeps it from reuse (hard).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..carnator.request import Request
from .colors import colors_of
from .fingerprint import NONCE, content, digest, readable
from .guidance import KEY, guidance_scale
from .naming import prompt_words
from .refusals import Unsupported, refuse, sampler_name
from .stages import continued
from .weights import COMPILE, architecture, model_path, patches, weights

TEXT = (
    "cross_attn",
    "pooled_output",
    "attention_mask",
    "conditioning_",
    "t5xxl_",
    "text_",
    "lyrics",
)
DROPPED = "uuid"  # new for every guider
NEUTRAL = (KEY, COMPILE)  # wrappers that leave the model's answers what they are
OWN_OPTIONS = (  # told apart below, known otherwise, or without effect on the result
    "transformer_options",
    "wrappers",
    "callbacks",
    "sample_sigmas",
    "to_load_options",  # the host's own working copy
    "torch_compile_kwargs",
)
# What every guider of the host's holds, and what is told apart by other keys.
HOSTS_OWN = (
    "model_patcher", "model_options", "original_conds", "conds", "inner_model", "loaded_models",
)  # fmt: skip
SIGMA_TOLERANCE = 1e-4


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
    refuse(guider, noise, sigmas, latent_shapes)
    patcher = guider.model_patcher
    name = sampler_name(sampler)
    schedule = tuple(sigmas.tolist())
    conds: Mapping[str, list[dict]] = guider.conds
    others = content(foreign_options(guider))
    before = continued(noise, latent_image)
    shape = tuple(noise.shape)
    family = type(patcher.model.model_config).__name__
    scale = guidance_scale(guider)
    hard = {
        "backbone": family,
        "latent": f"{list(shape)} {type(patcher.get_model_object('latent_format')).__name__}",
        "prediction": " ".join(c.__name__ for c in type(model_sampling(patcher)).__mro__),
        "initial": initial_state(latent_image, denoise_mask, before and before[1]),
        "conditioning": conditioning(conds),
        "stage": stage(patcher, schedule),
        "noise": digest(noise),
        "company": company(guider),
        "options": readable(others),
    }
    options = dict(getattr(sampler, "extra_options", {}))
    numbers = {k: float(v) for k, v in options.items() if isinstance(v, int | float)}
    inpaint = getattr(sampler, "inpaint_options", {})
    guidance = {k: v for k, v in vars(guider).items() if k not in HOSTS_OWN}
    soft = {
        "prompt": text([conds.get("positive", [])]),
        "negative": text([v for k, v in sorted(conds.items()) if k != "positive"]),
        "weights": weights(patcher),
        "patches": patches(patcher),
        "options": others,
        "cfg": content([type(guider).__module__, type(guider).__qualname__, guidance]),
        "sampler": content([name, options, inpaint]),
        "schedule": digest(list(schedule)),
        "start": before[0] if before else "",
    }
    labels = {"model": file_name(patcher) or family, "sampler": name, "prompt": prompt_words()}
    if before:
        labels["begins"] = before[0]
    return Request(
        hard=hard,
        soft=soft,
        architecture=architecture(patcher),
        sampler=name,
        sigmas=schedule,
        cfg=1.0 if scale is None else scale,
        seed=int(seed or 0),
        labels=labels,
        sampler_options=numbers,
        colors=colors_of(patcher),
    )


def model_sampling(patcher: Any) -> Any:
    return patcher.get_model_object("model_sampling")


def full_start(patcher: Any, first_sigma: float) -> bool:
    """True when a schedule starts from pure noise."""
    return first_sigma >= float(model_sampling(patcher).sigma_max) * (1 - SIGMA_TOLERANCE)


def stage(patcher: Any, sigmas: tuple[float, ...]) -> str:
    """Which part of a whole schedule a run covers: donors must cover the same one."""
    start = "noise" if full_start(patcher, sigmas[0]) else f"{sigmas[0]:.4f}"
    return f"{start} to {sigmas[-1]:.4f}"


def initial_state(latent_image: Tensor, mask: Tensor | None, origin: str | None = None) -> str:
    """Hash of what the run starts from besides noise; ``empty`` for text to image or video.

    With the ``origin`` of an earlier stage, that counts instead of the latent the stage left.
    """
    if origin is not None:
        return f"goes on from {digest([origin, mask])}"
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


def unsure(one: Request, other: Request) -> bool:
    """Whether two requests may differ in what cannot be read or compared: opaque parts, and the
    inner state of other packs' options, which changes as they run."""
    opaque = any(NONCE in v for r in (one, other) for v in (*r.hard.values(), *r.soft.values()))
    return opaque or one.soft.get("options") != other.soft.get("options")


def differences(one: Request, other: Request) -> list[str]:
    """Names of what is known to differ between two requests; ``unsure`` knows of the rest."""
    names = []
    for mine, theirs in ((one.hard, other.hard), (one.soft, other.soft)):
        keys = sorted({*mine, *theirs} - {"options"})
        names += [k for k in keys if readable(mine.get(k)) != readable(theirs.get(k))]
    if one.architecture != other.architecture:
        names.insert(0, "model")
    return [*names, "seed"] if one.seed != other.seed else names


def file_name(patcher: Any) -> str | None:
    """Name of the file the model was loaded from."""
    path = model_path(patcher)
    return os.path.basename(path) if path else None


def company(guider: Any) -> str:
    """Names of what other nodes put on the model: wrappers and options change what an evaluation
    is, so runs with and without them are no donors to each other. Nor are runs with other values
    of them (the key ``options``): many act only later than the first evaluation."""
    options = guider.model_options
    inner = options.get("transformer_options", {})
    wrappers = inner.get("wrappers", {})
    names = {f"{kind}:{key}" for kind in wrappers for key in wrappers[kind] if key not in NEUTRAL}
    names |= {k for k, v in options.items() if v and k not in OWN_OPTIONS}
    names |= {k for k, v in inner.items() if v and k not in OWN_OPTIONS}
    patcher = guider.model_patcher
    names |= {f"injection:{k}" for k, v in patcher.injections.items() if v}
    names |= {f"model:{k}" for k, v in patcher.additional_models.items() if v}
    return " ".join(sorted(names))


def foreign_options(guider: Any) -> list[Any]:
    """Every other option that may change the model's output."""
    options = {k: v for k, v in guider.model_options.items() if k not in OWN_OPTIONS}
    inner = guider.model_options.get("transformer_options", {})
    kept = {k: v for k, v in inner.items() if k not in OWN_OPTIONS}
    wrappers = {
        kind: {key: value for key, value in keyed.items() if key not in NEUTRAL}
        for kind, keyed in inner.get("wrappers", {}).items()
    }
    return [options, kept, {k: v for k, v in wrappers.items() if v}]
