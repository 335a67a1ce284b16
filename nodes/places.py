"""Where records are kept: the stores that runs of this process have used, and may be looked at."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from ..carnator.store import Store
from . import users

KEPT = 64  # stores remembered


@dataclass(frozen=True)
class StoreChoice:
    """Where the records are and how big they may grow (bytes). Opening it twice is free."""

    folder: Path
    size_limit: int

    def open(self) -> Store:
        """The store for the prompt that is running, in the name space of its user. StoreError."""
        return self.open_for(users.of_run())

    def open_for(self, user: str) -> Store:
        """The store of one user. StoreError."""
        store = Store.open(self.folder, self.size_limit, namespace=users.name_space(user))
        with _lock:
            _used[user, key_of(self.folder)] = self
            _used.move_to_end((user, key_of(self.folder)))
            while len(_used) > KEPT:
                _used.popitem(last=False)
        return store


_used: OrderedDict[tuple[str, str], StoreChoice] = OrderedDict()
_lock = Lock()


def key_of(folder: Path) -> str:
    """A name for a folder that tells nothing of it."""
    return hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest()


def used_by(user: str) -> dict[str, StoreChoice]:
    """The stores that a user's runs or pages have opened, by ``key_of`` their folders."""
    with _lock:
        return {key: choice for (owner, key), choice in _used.items() if owner == user}
