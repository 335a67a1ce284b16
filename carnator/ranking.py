"""Exact search for the Early Signatures nearest to one.

Signatures of one backbone are all nearly parallel: each number is centred and scaled by its spread
over the candidates first. Of the scaled signatures w, |w - t|^2 = |w|^2 - 2 w t + |t|^2 is then
one matrix-vector product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Ranking:
    """Signatures of one length, prepared for search.

    ``signatures``: at least one, float16 [K] each. What is added later with ``more`` is scaled by
    the spread of these.
    """

    def __init__(self, signatures: Sequence[np.ndarray]) -> None:
        matrix = np.stack(signatures).astype(np.float32)
        self._center = matrix.mean(0)
        spread = matrix.std(0)
        self._scale = np.divide(1, spread, where=spread >= 1e-6, out=np.zeros_like(spread))
        self._rows = self._scaled(matrix)
        self._norms = np.einsum("ij,ij->i", self._rows, self._rows)

    def distances(self, target: np.ndarray, more: Sequence[np.ndarray] = ()) -> np.ndarray:
        """Squared scaled distances [N + len(more)] of a signature [K] to all of them; those that
        nothing tells apart can differ by rounding."""
        t = self._scaled(target.astype(np.float32))
        found = self._norms - 2 * (self._rows @ t) + float(t @ t)
        if more:
            rest = self._scaled(np.stack(more).astype(np.float32)) - t
            found = np.concatenate([found, np.einsum("ij,ij->i", rest, rest)])
        return found

    def _scaled(self, rows: np.ndarray) -> np.ndarray:
        return (rows - self._center) * self._scale


def smallest(distances: np.ndarray, most: int) -> list[int]:
    """Indices of the ``most`` smallest, smallest first; among equals the earlier."""
    if most < len(distances):
        near = np.sort(np.argpartition(distances, most)[:most])
    else:
        near = np.arange(len(distances))
    return [int(i) for i in near[np.argsort(distances[near], kind="stable")]]
