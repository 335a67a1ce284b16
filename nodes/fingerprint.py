"""Content hashes of whatever a graph can attach to a sampler run.

The host's own ids (uuids of conditionings and patches) are random, so two equal requests can only
be told from two different ones by what they hold. What cannot be read is *opaque*: it is named,
and it is for the caller to decide what an unprovable equality is worth.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import types
import uuid
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

NONCE = " once "
SAMPLES = 64  # values read of a tensor that is sampled instead of hashed whole
MAX_DEPTH = 12
MAX_PARTS = 100_000
SMALL = 1_000_000  # values in a module that is read like any object, such as a noise schedule
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Enum,
    PurePath,
    torch.dtype,
    torch.device,
    type(...),
)


class Digest:
    """A running hash of nested Python values and tensors.

    ``sampled`` reads 64 evenly spaced values of each tensor instead of all of it: enough to tell
    two LoRAs apart without moving gigabytes. ``opaque`` lists the types that could not be read.
    """

    def __init__(self, sampled: bool = False):
        self.sampled = sampled
        self.opaque: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._parts = 0
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # ids in _seen stay unique only while their objects live

    def add(self, *values: Any) -> Digest:
        for value in values:
            self._add(value, 0)
        return self

    @property
    def hex(self) -> str:
        return self._hash.hexdigest()

    def _mark(self, *words: object) -> None:
        self._hash.update(("|".join(map(str, words)) + "\n").encode())

    def _give_up(self, value: Any) -> None:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        self._mark("opaque", name)
        self.opaque.append(name)

    def _add(self, value: Any, depth: int) -> None:
        self._parts += 1
        if value is None or isinstance(value, PLAIN):
            self._mark(type(value).__name__, repr(value))
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._tensor(torch.from_numpy(np.ascontiguousarray(value)))
        elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            self._mark("name", getattr(value, "__module__", ""), _qualname(value))
        elif _large(value) or depth > MAX_DEPTH or self._parts > MAX_PARTS:
            self._give_up(value)
        elif id(value) in self._seen:
            self._mark("again", self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
            self._composite(value, depth + 1)

    def _composite(self, value: Any, depth: int) -> None:
        if isinstance(value, Mapping):
            self._mark("map", len(value))
            for key in sorted(value, key=repr):
                self._add(key, depth)
                self._add(value[key], depth)
        elif isinstance(value, set | frozenset):
            self._mark("set", *sorted(map(repr, value)))
        elif isinstance(value, Sequence):
            self._mark("list", len(value))
            for item in value:
                self._add(item, depth)
        elif isinstance(value, functools.partial):
            self._mark("partial")
            for item in (value.func, value.args, value.keywords):
                self._add(item, depth)
        elif isinstance(value, types.MethodType):
            self._mark("method", value.__func__.__qualname__)
            self._add(value.__self__, depth)
        elif isinstance(value, types.FunctionType):
            self._mark("function", value.__module__, value.__qualname__)
            self._code(value.__code__, depth)
            state = _rebound(value.__code__)
            named = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            cells = [c.cell_contents for name, c in named if name not in state and _filled(c)]
            for item in (value.__defaults__, value.__kwdefaults__, cells):
                self._add(item, depth)
        elif hasattr(value, "__dict__") and not hasattr(value, "model_patches_to"):
            self._mark("object", *(f"{c.__module__}.{c.__qualname__}" for c in type(value).__mro__))
            self._add(vars(value), depth)
        else:
            self._give_up(value)

    def _code(self, code: types.CodeType, depth: int) -> None:
        """What a function does: its steps, and the constants and names they refer to."""
        self._hash.update(code.co_code)
        for item in (*code.co_names, *code.co_consts):
            if isinstance(item, types.CodeType):
                self._code(item, depth)
            else:
                self._add(item, depth)

    def _tensor(self, value: Tensor) -> None:
        self._mark("tensor", value.dtype, tuple(value.shape))
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            self._give_up(value)  # a quantised or nested tensor: its storage is not its content
            return
        flat = value.detach().reshape(-1)
        if self.sampled and flat.numel() > SAMPLES:
            index = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64)
            flat = flat[index.long().to(flat.device)]
        self._hash.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def digest(*values: Any) -> str:
    """Hash of values whose every part must be readable; raises ValueError that names the rest."""
    result = Digest().add(*values)
    if result.opaque:
        raise ValueError(f"Content of {', '.join(sorted(set(result.opaque)))} cannot be read.")
    return result.hex


def content(value: Any, sampled: bool = False) -> str:
    """Hash of a soft key. What cannot be read makes it unlike any other, now and later."""
    result = Digest(sampled).add(value)
    return result.hex + nonce() if result.opaque else result.hex


def nonce() -> str:
    """What makes a soft key equal to none, not even to itself a second time."""
    return NONCE + uuid.uuid4().hex


def readable(value: str | None) -> str:
    """A key without its nonce."""
    return (value or "").rsplit(NONCE, 1)[0]


@functools.lru_cache(maxsize=1024)
def _rebound(code: types.CodeType) -> frozenset[str]:
    """Names of the outer variables that a function writes: what it keeps while it runs, as against
    what it was set up with."""
    written = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_DEREF"}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            written |= _rebound(inner)
    return frozenset(written & set(code.co_freevars))


def _large(value: Any) -> bool:
    """True for networks: who walks into one reads the weights of a model."""
    if not isinstance(value, torch.nn.Module):
        return False
    return sum(t.numel() for t in (*value.parameters(), *value.buffers())) > SMALL


def _qualname(value: Any) -> str:
    return str(getattr(value, "__qualname__", getattr(value, "__name__", "")))


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a closure over a name that is not bound yet
        return False
    return True
