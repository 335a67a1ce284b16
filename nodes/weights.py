"""Which weights a run uses, told without reading gigabytes: the model's file, and what lies on it.

A file is known by its content, not by its name or its times, so that a copy, a rename or a touch
leaves a request what it was.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from typing import Any

from ..carnator import backbones
from .fingerprint import content, nonce

BLOCKS, BLOCK = 256, 4096  # read of a file: so many evenly spaced blocks of so many bytes
COMPILE = "torch.compile"  # the host's key for it


def token_layout(patcher: Any) -> backbones.TokenLayout | None:
    """How the diffusion model lays out its tokens; None where that is not known."""
    named = patcher.model.diffusion_model.named_parameters()
    return backbones.layout_of({n.replace("_orig_mod.", ""): tuple(p.shape) for n, p in named})


def architecture(patcher: Any) -> str:
    """Hash of the names and shapes of the diffusion model's weights; reads no weight.

    Parts that are compiled, here or still from a run before, do not count as others.
    """
    named = patcher.model.diffusion_model.named_parameters()
    return backbones.architecture((n.replace("_orig_mod.", ""), tuple(p.shape)) for n, p in named)


def model_path(patcher: Any) -> str | None:
    """The file the model was loaded from, where the loader left its name."""
    origin = getattr(patcher, "cached_patcher_init", None)
    path = origin[1][0] if origin and origin[1] else None
    return path if isinstance(path, str) else None


def weights(patcher: Any) -> str:
    """The file's content, how the loader was told to treat it, and the type in memory."""
    path = model_path(patcher)
    if path is None:
        return f"unknown{nonce()}"
    try:
        found = os.stat(path)
        held = file_digest(path, found.st_size, found.st_mtime_ns)
    except OSError:  # moved away since it was loaded
        return f"unknown{nonce()}"
    asked = [given for given in patcher.cached_patcher_init[1] if isinstance(given, dict)]
    return f"{held} {content([asked, str(patcher.model_dtype())])}"


@functools.lru_cache(maxsize=64)
def file_digest(path: str, size: int, changed: int) -> str:  # noqa: ARG001
    """Hash of a file's size and of 256 blocks of 4 KiB over its length, the first and the last
    among them; ``changed`` (its time) only keeps the cache of this function honest.

    Two sets of trained weights differ in nearly every block. Raises OSError.
    """
    hasher = hashlib.blake2b(str(size).encode(), digest_size=16)
    last = max(0, size - BLOCK)
    with open(path, "rb", buffering=0) as file:
        for start in sorted({last * i // (BLOCKS - 1) for i in range(BLOCKS)}):
            file.seek(start)
            hasher.update(file.read(BLOCK))
    return hasher.hexdigest()


def patches(patcher: Any) -> str:
    """Hash of everything laid over the weights: LoRAs (key, strength, sampled values) and more.

    A module that is there compiled instead of plain computes the same.
    """
    objects = {k: v for k, v in patcher.object_patches.items() if not _is_compiled(v)}
    return content(
        [
            patcher.patches,
            getattr(patcher, "weight_wrapper_patches", {}),
            objects,
            patcher.injections,  # what they inject is seldom readable: then nothing is exact
            patcher.hook_patches,
        ],
        sampled=True,
    )


def compiled(patcher: Any, wrappers: Mapping[str, Mapping]) -> bool:
    """True when torch.compile runs the model, or parts of it.

    Whatever is handed into a compiled call is built into its graph, and stays there.
    """
    if any(key == COMPILE for keyed in wrappers.values() for key in keyed):
        return True
    modules = patcher.model.diffusion_model.modules()
    return any(map(_is_compiled, (*patcher.object_patches.values(), *modules)))


def _is_compiled(value: Any) -> bool:
    inside = ("_orig_mod", "_torchdynamo_orig_callable", "_compiled_call_impl")
    return any(getattr(value, name, None) is not None for name in inside)
