"""Recognising a backbone by its build, not by its file name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence


def architecture(shapes: Iterable[tuple[str, Sequence[int]]]) -> str:
    """A short hash of all parameter names and shapes of a diffusion model.

    Fine-tunes, merges and quantised copies of one architecture share it; it says which risk table
    applies and which records can be donors.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, shape in sorted((name, tuple(shape)) for name, shape in shapes):
        digest.update(f"{name}:{','.join(map(str, shape))};".encode())
    return digest.hexdigest()
