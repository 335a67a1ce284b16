"""Records as a person sees them. What a record says of itself is untrusted here, too."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from .record import Entry, is_number
from .value import Usage

LABEL_LENGTH = 500  # characters


@dataclass(frozen=True)
class Card:
    """A record in a list. Times in seconds since the epoch (0 = never); ``nbytes`` of its file;
    ``seconds`` of its dense run, ``seconds_saved`` by all its hits; ``model`` is the file it came
    from, or else its architecture."""

    id: str
    label: str
    created: float
    nbytes: int
    pinned: bool
    hits: int
    seconds_saved: float
    last_used: float
    seconds: float
    model: str
    sampler: str
    steps: int
    cfg: float
    seed: str
    shape: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)


def card(entry: Entry, usage: Usage, pinned: bool) -> Card:
    """The card of a record; whatever it does not say, or says in another form, is left blank."""
    meta = entry.meta
    labels = meta.get("labels")
    named = _text(labels.get("model")) if isinstance(labels, dict) else ""
    sigmas, shape = meta.get("sigmas"), meta.get("shape")
    seed = meta.get("seed")  # as text: JavaScript has no 64-bit integers
    plain = isinstance(shape, list) and len(shape) <= 8 and {type(n) for n in shape} <= {int}
    return Card(
        id=entry.id,
        label=_text(meta.get("label")),
        created=entry.created,
        nbytes=entry.nbytes,
        pinned=pinned,
        hits=usage.hits,
        seconds_saved=usage.seconds_saved,
        last_used=usage.last,
        seconds=_number(meta.get("seconds")),
        model=named or _text(meta.get("architecture")),
        sampler=_text(meta.get("sampler")),
        steps=len(sigmas) if isinstance(sigmas, list) else 0,
        cfg=_number(meta.get("cfg")),
        seed=str(seed) if type(seed) is int else "",
        shape=tuple(shape) if plain and shape else (),
    )


def matches(shown: Card, words: list[str]) -> bool:
    """Whether all words stand in what a card says."""
    text = f"{shown.label} {shown.model} {shown.sampler} {shown.seed} {shown.id}".casefold()
    return all(word in text for word in words)


def _text(value: Any) -> str:
    """Text of one line and moderate length, printable as it is."""
    if not isinstance(value, str):
        return ""
    line = " ".join(value[: 4 * LABEL_LENGTH].split())
    return "".join(c if c.isprintable() else "�" for c in line)[:LABEL_LENGTH]


def _number(value: Any) -> float:
    return float(value) if is_number(value) and math.isfinite(value) and abs(value) < 1e15 else 0.0
