"""The records of one partition, as matching looks at them: by request, and by likeness."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import cached_property

import numpy as np

from ..ranking import Ranking, smallest
from .brief import Brief

SPARE = 16  # records that come or go before the search is prepared anew, or
SPARE_SHARE = 20  # one in so many of those there are, whichever is more
BYTES_PER_NUMBER = 8  # of a signature: float16 as it is, float32 scaled, and what holds them


class Shelf:
    """Briefs of one partition. Never changes; ``after`` makes the next one."""

    def __init__(self, briefs: dict[str, Brief], before: Shelf | None = None) -> None:
        self._briefs = briefs
        self._groups: dict[int, _Group] = {} if before is None else dict(before._groups)

    def __len__(self) -> int:
        return len(self._briefs)

    @cached_property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        numbers = next((b.signature.size for b in self._briefs.values()), 0)  # mostly all alike
        return len(self._briefs) * (1000 + BYTES_PER_NUMBER * numbers)

    @cached_property
    def _lengths(self) -> set[int]:
        return {brief.signature.size for brief in self._briefs.values()}

    def after(self, ids: Collection[str], fetch: Callable[[str], Brief | None]) -> Shelf:
        """The shelf of the records ``ids``; what is not known yet is fetched (None: left out)."""
        there = set(ids)
        briefs = dict(self._briefs)
        for gone in briefs.keys() - there:
            del briefs[gone]
        for new in there - briefs.keys():
            brief = fetch(new)
            if brief is not None:
                briefs[new] = brief
        return Shelf(briefs, self)

    def same_request(self, identity: str) -> list[str]:
        """Ids of the records of a request, newest first."""
        found = [brief for brief in self._briefs.values() if brief.identity == identity]
        found.sort(key=lambda brief: (brief.created, brief.id), reverse=True)
        return [brief.id for brief in found]

    def nearest(self, target: np.ndarray, most: int) -> list[str]:
        """Ids of the ``most`` records with the nearest signatures, nearest first. Signatures of
        another length are left out."""
        named = self._briefs
        if self._lengths != {target.size}:
            named = {i: b for i, b in named.items() if b.signature.size == target.size}
        if not named:
            return []
        group = self._groups.get(target.size)
        if group is None or not group.serves(named):
            group = self._groups[target.size] = _Group(named)
        return group.nearest(target, named, most)


class _Group:
    """A prepared search among those that were there when it was made."""

    def __init__(self, named: dict[str, Brief]) -> None:
        self._names = list(named)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._ranking = Ranking([brief.signature for brief in named.values()])

    def serves(self, named: dict[str, Brief]) -> bool:
        """Whether few enough came and went since."""
        differing = len(self._places.keys() ^ named.keys())
        return differing <= max(SPARE, len(self._names) // SPARE_SHARE)

    def nearest(self, target: np.ndarray, named: dict[str, Brief], most: int) -> list[str]:
        new = sorted(named.keys() - self._places.keys())
        gone = self._places.keys() - named.keys()
        distances = self._ranking.distances(target, [named[name].signature for name in new])
        distances[[self._places[name] for name in gone]] = np.inf
        found = smallest(distances, min(most, len(named)))
        names = self._names
        return [names[i] if i < len(names) else new[i - len(names)] for i in found]


class Shelves:
    """The shelves used last, within a bound of memory. Any thread may call any method."""

    def __init__(self, limit: int) -> None:
        """``limit`` in bytes; the shelf in use is kept whatever it takes."""
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[object, Shelf]] = {}  # least recently used first

    def get(self, partition: str) -> tuple[object, Shelf] | None:
        """What ``keep`` was given last for a partition: the state of the index, and the shelf."""
        with self._lock:
            found = self._kept.pop(partition, None)
            if found is not None:
                self._kept[partition] = found
            return found

    def keep(self, partition: str, state: object, shelf: Shelf) -> None:
        with self._lock:
            self._kept.pop(partition, None)
            self._kept[partition] = (state, shelf)
            total = sum(kept.nbytes for _, kept in self._kept.values())
            for name in list(self._kept)[:-1]:
                if total <= self._limit:
                    break
                total -= self._kept.pop(name)[1].nbytes

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
