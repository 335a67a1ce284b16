"""How much memory the machine has left, and small caches that give theirs back."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

try:
    import psutil  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:  # every ComfyUI has it; without it the store's own bounds are all there is
    psutil = None

LEAST_FREE = 2**30  # bytes of available memory below which the store lets go of what it keeps
V = TypeVar("V")


def under_pressure() -> bool:
    """Whether the machine is short of memory; False where that cannot be told."""
    try:
        return psutil is not None and psutil.virtual_memory().available < LEAST_FREE
    except (OSError, RuntimeError, ValueError):
        return False


class Kept(Generic[V]):
    """The ``most`` values used last, by name. Any thread may call any method."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._values: dict[str, V] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: str) -> V | None:
        with self._lock:
            value = self._values.pop(name, None)
            if value is not None:
                self._values[name] = value
            return value

    def keep(self, name: str, value: V) -> None:
        with self._lock:
            self._values.pop(name, None)
            self._values[name] = value
            while len(self._values) > self._most:
                del self._values[next(iter(self._values))]

    def drop(self, name: str) -> None:
        with self._lock:
            self._values.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
