"""What a record is worth, and which records go first. The one place to change the policy.

A record is worth the seconds it can be expected to save, per byte. The dense run it came from
says what one hit can save, and its making counts as one hit; every real hit adds the seconds it
did save. All of these fade with the same half-life, so that the sum of many is one number with one
date: ``credit`` of a Usage.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from .brief import Brief
from .errors import RecordError
from .record import dumps, is_number, loads

HALF_LIFE = 14 * 86400.0  # seconds after which a hit counts half (start value)


@dataclass(frozen=True)
class Usage:
    """How a record was used: hits, seconds they saved, time of the last one (0 = never), and the
    seconds saved as they count at that time, earlier ones faded."""

    hits: int = 0
    seconds_saved: float = 0.0
    last: float = 0.0
    credit: float = 0.0

    def pack(self) -> bytes:
        """As the bytes of a row."""
        return dumps([self.hits, self.seconds_saved, self.last, self.credit]).encode("ascii")

    @classmethod
    def unpack(cls, row: bytes | None) -> Usage:
        """From an untrusted row; whatever is not as expected counts as never used."""
        try:
            hits, *numbers = loads((row or b"").decode("ascii"))
            good = type(hits) is int and len(numbers) == 3 and all(map(is_number, numbers))
            if good and min(hits, *numbers) >= 0 and max(hits, *numbers) < 1e15:
                return cls(hits, *map(float, numbers))
        except (RecordError, TypeError, ValueError):
            pass
        return cls()

    def add(self, seconds: float, now: float) -> Usage:
        """With one more hit. A clock set back fades nothing."""
        credit = seconds + self.credit * faded(now - self.last)
        return Usage(self.hits + 1, self.seconds_saved + seconds, now, credit)


def faded(idle: float) -> float:
    """What a hit counts after ``idle`` seconds, 1 for a fresh one."""
    return 0.5 ** (max(0.0, idle) / HALF_LIFE)


def value(brief: Brief, usage: Usage, now: float) -> float:
    """Expected seconds saved per byte, as a logarithm: higher is kept longer."""
    latest = max(brief.created, usage.last)
    credit = brief.seconds * faded(latest - brief.created)
    credit += usage.credit * faded(latest - usage.last)
    # As a logarithm: after some years idle the number itself would be 0 for all alike.
    fading = math.log(2.0) * max(0.0, now - latest) / HALF_LIFE
    return math.log(max(credit, 1e-300) / max(1, brief.nbytes)) - fading


def victims(
    briefs: Iterable[Brief],
    usage: Mapping[str, Usage],
    now: float,
    *,
    excess: int,
    number: int = 0,
    keep: Collection[str] = (),
    first: Collection[str] = (),
) -> list[str]:
    """Ids of the least valuable records that together free at least ``excess`` bytes, and are at
    least ``number``.

    Records to ``keep`` (pinned ones) are never among them, and those that are to be replaced
    anyway go ``first``. All others are returned if even they do not suffice.
    """
    none = Usage()
    ranked = sorted(
        (brief for brief in briefs if brief.id not in keep),
        key=lambda b: (b.id not in first, value(b, usage.get(b.id, none), now), b.created, b.id),
    )
    chosen: list[str] = []
    for brief in ranked:
        if excess <= 0 and len(chosen) >= number:
            break
        chosen.append(brief.id)
        excess -= brief.nbytes
    return chosen
