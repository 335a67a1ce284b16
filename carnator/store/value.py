"""What a record is worth, and which records go first. The one place to change the policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import RecordError
from .record import Entry, dumps, is_number, loads

HALF_LIFE = 14 * 86400.0  # seconds without use after which a record is worth half (start value)


@dataclass(frozen=True)
class Usage:
    """How a record was used: hits, seconds they saved, time of the last one (0 = never)."""

    hits: int = 0
    seconds_saved: float = 0.0
    last: float = 0.0

    def pack(self) -> bytes:
        """As the bytes of a row."""
        return dumps([self.hits, self.seconds_saved, self.last]).encode("ascii")

    @classmethod
    def unpack(cls, row: bytes | None) -> Usage:
        """From an untrusted row; whatever is not as expected counts as never used."""
        try:
            hits, seconds, last = loads((row or b"").decode("ascii"))
            good = type(hits) is int and is_number(seconds) and is_number(last)
            if good and min(hits, seconds, last) >= 0 and max(hits, seconds, last) < 1e15:
                return cls(hits, float(seconds), float(last))
        except (RecordError, TypeError, ValueError):
            pass
        return cls()

    def add(self, seconds: float, now: float) -> Usage:
        """With one more hit."""
        return Usage(self.hits + 1, self.seconds_saved + seconds, now)


def value(entry: Entry, usage: Usage, now: float) -> float:
    """Expected seconds saved per byte, as a log: higher is kept longer.

    Seconds a hit can save: those of the dense run. Expected hits: those so far plus one, halved
    for each HALF_LIFE without use.
    """
    seconds = entry.meta.get("seconds")
    if not is_number(seconds) or not 0 < seconds < 1e9:
        seconds = 1.0
    idle = max(0.0, now - max(entry.created, usage.last))  # a clock set back makes nothing old
    worth = math.log(seconds * (1 + max(0, usage.hits)) / max(1, entry.nbytes))
    return worth - math.log(2.0) * idle / HALF_LIFE


def victims(
    entries: Iterable[Entry],
    usage: Mapping[str, Usage],
    excess: int,
    now: float,
    protect: str | None = None,
) -> list[str]:
    """Ids of the least valuable records that together free at least ``excess`` bytes.

    ``protect`` (the record just written) is never among them. All others are returned if even
    they do not suffice.
    """
    candidates = [entry for entry in entries if entry.id != protect]
    none = Usage()
    candidates.sort(key=lambda e: (value(e, usage.get(e.id, none), now), e.created, e.id))
    chosen: list[str] = []
    for entry in candidates:
        if excess <= 0:
            break
        chosen.append(entry.id)
        excess -= entry.nbytes
    return chosen
