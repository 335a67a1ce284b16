"""The caption language of the demo clips: coloured shapes that move over a plain background.

A caption reads "red circle left and blue square still on gray": one or two objects, each a
colour, a shape and a motion, and a background. Filler words ("a", "moving", ...) are allowed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Set
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

COLORS = ("red", "green", "blue", "yellow", "magenta", "cyan")
SHAPES = ("circle", "square", "triangle")
MOTIONS = ("left", "right", "up", "down", "still")
BACKGROUNDS = ("black", "gray", "white")
FILLER = frozenset(("a", "an", "the", "moving", "moves", "standing", "background", "going"))

TEXT_TOKENS = 12
TEXT_DIM = 64
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Thing:
    """One object of a clip."""

    color: str
    shape: str
    motion: str


@dataclass(frozen=True)
class Caption:
    """What a clip shows: one or two things of different colour, and the background."""

    things: tuple[Thing, ...]
    background: str

    def words(self) -> list[str]:
        out: list[str] = []
        for thing in self.things:
            out += ["and"] * bool(out) + [thing.color, thing.shape, thing.motion]
        return [*out, "on", self.background]

    def __str__(self) -> str:
        return " ".join(self.words())

    @property
    def held_out(self) -> bool:
        """True for the tenth of all captions that training never sees."""
        digest = hashlib.blake2b(str(self).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64 < HELD_OUT_SHARE


def parse(text: str) -> Caption:
    """Read a caption. Raises ValueError that says which word was not understood."""
    words = [w for w in text.lower().replace(",", " ").split() if w not in FILLER]
    if "on" not in words or len(words) < 2 or words[-2] != "on":
        raise ValueError(
            f"The caption {text!r} must end in 'on' and a background, one of "
            f"{', '.join(BACKGROUNDS)}; for example 'red circle left on gray'."
        )
    background, things, rest = words[-1], [], words[:-2]
    while rest:
        chunk, rest = rest[:3], rest[3:]
        vocabularies = zip(("colour", "shape", "motion"), (COLORS, SHAPES, MOTIONS), strict=True)
        for i, (what, known) in enumerate(vocabularies):
            if len(chunk) <= i or chunk[i] not in known:
                got = f"{chunk[i]!r}" if len(chunk) > i else "nothing"
                raise ValueError(
                    f"The caption {text!r} has {got} where a {what} is expected: use one of "
                    f"{', '.join(known)}."
                )
        things.append(Thing(*chunk))
        if rest:
            if rest[0] != "and":
                raise ValueError(f"The caption {text!r} needs 'and' between its two things.")
            rest = rest[1:]
            if not rest:
                raise ValueError(f"The caption {text!r} names nothing after 'and'.")
    if background not in BACKGROUNDS:
        raise ValueError(
            f"The caption {text!r} has the background {background!r}: use one of "
            f"{', '.join(BACKGROUNDS)}."
        )
    if not 1 <= len(things) <= 2 or len({t.color for t in things}) != len(things):
        raise ValueError(f"The caption {text!r} must name one thing, or two of different colour.")
    return Caption(tuple(things), background)


def random_caption(rng: random.Random, count: int | None = None) -> Caption:
    """A caption drawn at random; two things in two of three cases unless ``count`` says."""
    count = count or rng.choice((1, 2, 2))
    colors = rng.sample(COLORS, count)
    things = tuple(Thing(c, rng.choice(SHAPES), rng.choice(MOTIONS)) for c in colors)
    return Caption(things, rng.choice(BACKGROUNDS))


TWEAKS = ("color", "shape", "motion", "background", "count", "unrelated")


def tweak(caption: Caption, kind: str, rng: random.Random) -> Caption:
    """The caption with one word changed (``color``, ``shape``, ``motion``, ``background``),
    one thing more or less (``count``), or another caption altogether (``unrelated``)."""

    def other(current: str, options: tuple[str, ...], taken: Set[str] = frozenset()) -> str:
        return rng.choice([o for o in options if o != current and o not in taken])

    things = list(caption.things)
    i = rng.randrange(len(things))
    thing = things[i]
    if kind == "color":
        things[i] = replace(thing, color=other(thing.color, COLORS, {t.color for t in things}))
    elif kind == "shape":
        things[i] = replace(thing, shape=other(thing.shape, SHAPES))
    elif kind == "motion":
        things[i] = replace(thing, motion=other(thing.motion, MOTIONS))
    elif kind == "background":
        return replace(caption, background=other(caption.background, BACKGROUNDS))
    elif kind == "count":
        if len(things) == 2:
            del things[i]
        else:
            color = other(thing.color, COLORS)
            things.append(Thing(color, rng.choice(SHAPES), rng.choice(MOTIONS)))
    elif kind == "unrelated":
        while True:
            fresh = random_caption(rng)
            shared = set(fresh.words()) & set(caption.words()) - {"and", "on"}
            if fresh.background != caption.background and len(shared) <= 1:
                return fresh
    else:
        raise ValueError(f"Unknown kind of tweak {kind!r}: use one of {', '.join(TWEAKS)}.")
    return replace(caption, things=tuple(things))


def _hashed_vector(name: str) -> np.ndarray:
    """A fixed pseudo-random vector of unit variance, the same on every machine and version."""
    raw = hashlib.shake_256(name.encode()).digest(4 * TEXT_DIM)
    uniform = np.frombuffer(raw, dtype="<u4").astype(np.float64) / 2**32
    return ((uniform - 0.5) * 12**0.5).astype(np.float32)


def embed(caption: Caption | None) -> Tensor:
    """Text embedding [12, 64] of a caption; ``None`` gives the empty prompt."""
    words = caption.words() if caption is not None else []
    rows = [0.5 * _hashed_vector(f"position {i}") for i in range(TEXT_TOKENS)]
    for i, word in enumerate(words):
        rows[i] = rows[i] + _hashed_vector(f"word {word}")
    return torch.from_numpy(np.stack(rows))
