"""Connectivity over a run: recording it on a dense run, reusing it on a target's evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention.blocks import KeyLists, pack_bits, unpack_bits
from ..attention.override import Connections
from .fuse import dense_layers, fuse
from .layout import Layout
from .observe import RECALL, Observed, observe, row_mass, sample_rows
from .pack import Geometry, Layer, Packed, pack
from .template import Template
from .verify import DENSE, SOURCES, Verdict, chosen, judge

ANCHORS = (0.95, 0.80, 0.50)


def anchor_steps(sigmas: Sequence[float], anchors: Sequence[float] = ANCHORS) -> dict[int, float]:
    """The steps of a falling schedule at which a dense run is observed, and their sigmas: the
    nearest to each anchor, but none of the first two, whose masks resemble no later ones."""
    steps = range(2, len(sigmas))
    chosen = {min(steps, key=lambda i: abs(sigmas[i] - a)) for a in anchors} if steps else set()
    return {i: float(sigmas[i]) for i in sorted(chosen)}


class _Bitmaps(Sequence["Layer | None"]):
    """The masks of one anchor's layers, an eighth of a byte a pair of blocks; None where nothing
    was seen."""

    def __init__(self, layers: int):
        self._held: list[tuple[Tensor, int, Tensor] | None] = [None] * layers

    def put(self, layer: int, seen: Observed) -> None:
        self._held[layer] = (pack_bits(seen.mask), seen.mask.shape[-1], seen.sparse)

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, layer: Any) -> Any:
        held = self._held[layer]
        return None if held is None else Layer(unpack_bits(held[0], held[1]), held[2])


class Recorder:
    """Observes a dense run's self-attention at its anchors.

    ``layers`` and ``heads`` are those of the backbone's attention over this layout.
    """

    def __init__(self, layout: Layout, layers: int, heads: int, anchors: int):
        self.layout = layout
        self.geometry = Geometry.of(layout, layers, heads)
        self._masks = [_Bitmaps(layers) for _ in range(anchors)]

    def see(
        self, anchor: int, layer: int, q: Tensor, k: Tensor, scale: float | None = None
    ) -> None:
        """Take one call's q [H, N, D] and k [G, N, D], of the positive branch."""
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self._masks[anchor].put(layer, observe(q, k, self.layout, scale, turn=anchor))

    def pack(self, sigmas: Sequence[float], template: Template) -> bytes:
        """All that was seen, for a record."""
        return pack(self._masks, sigmas, self.geometry, template)


@dataclass
class LayerUse:
    """What reuse did in one layer over a run: calls, heads by the source of their mask, the
    mean density, and the least recall met in a head that ran sparse."""

    calls: int = 0
    heads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    density: float = 1.0
    least_recall: float | None = None


@dataclass(eq=False)
class _Held:
    """The masks of one layer at one anchor, as far as they have been judged."""

    fused: Tensor
    union: Tensor
    source: Tensor
    lists: KeyLists | None = None


class Reuse:
    """Masks for the evaluations of a target run, each tried on the target before it is used.

    Args:
        layout, layers, heads: of the backbone's self-attention.
        template: what stands in for a donor, and widens its masks where they hold too little.
        donor: the donor's packed masks, or None to use the template's.
        target: bool [blocks], the blocks with target-specific tokens (``fuse.target_blocks``).
        least: mass recall that every sparse head must keep.
        most: density above which a head stays dense.
    """

    def __init__(
        self,
        layout: Layout,
        layers: int,
        heads: int,
        template: Template,
        donor: Packed | None = None,
        target: Tensor | None = None,
        least: float = RECALL,
        most: float = 1.0,
    ):
        geometry = Geometry.of(layout, layers, heads)
        if donor is not None and donor.geometry != geometry:
            raise ValueError(f"The donor's masks are of {donor.geometry}, not of {geometry}.")
        self.layout, self.layers, self.heads = layout, layers, heads
        self.template, self.donor, self.target = template, donor, target
        self.least, self.most = least, most
        self.report = [LayerUse() for _ in range(layers)]
        self._held: dict[tuple[int, int], _Held | None] = {}
        self._dense: dict[int, frozenset[int]] = {}
        self._turn = 0

    def retarget(self, target: Tensor | None) -> None:
        """Count other blocks as the target's own from here on. Heads that had to do without the
        donor's mask still do."""
        if target is None or (self.target is not None and torch.equal(target, self.target)):
            return
        self.target = target
        for (anchor, layer), held in list(self._held.items()):
            made = None if held is None else self._fetch(anchor, layer)
            if held is not None and made is not None:
                made.source = torch.maximum(made.source, held.source)
                self._held[anchor, layer] = made

    def density(self, layer: int, sigma: float) -> float:
        """The density of the masks that a layer's next call would be tried with; 1 where it stays
        dense."""
        held = self._at(layer, sigma)[1]
        if held is None:
            return 1.0
        if held.lists is not None:
            return held.lists.density
        each = held.fused.float().mean((1, 2))
        return float(torch.where(held.source == DENSE, 1.0, each).mean())

    def connections(
        self, layer: int, sigma: float, q: Tensor, k: Tensor, scale: float | None = None
    ) -> Connections | None:
        """What a layer's call with q [B, H, N, D], k [B, G, N, D] may look at, or None when it
        stays dense."""
        if q.shape[1:3] != (self.heads, self.layout.tokens) or k.shape[2] != q.shape[2]:
            return None
        key, held = self._at(layer, sigma)
        if held is None:
            return None
        self._turn += 1
        rows = sample_rows(self.layout, self._turn)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        mass = row_mass(q, k, self.layout, rows, scale)
        verdict = judge(mass, held.fused, held.union, rows, self.least, held.source)
        if held.lists is None or not torch.equal(verdict.source, held.source):
            held.source = verdict.source
            mask = chosen(verdict, held.fused, held.union)
            held.lists = KeyLists(mask, self.layout.block)
        self._note(layer, verdict, held.lists)
        if bool((verdict.source == DENSE).all()):
            self._held[key] = None
            return None
        return Connections(held.lists, self.layout.order.to(q.device))

    def _at(self, layer: int, sigma: float) -> tuple[tuple[int, int], _Held | None]:
        """The masks of a layer that count at a noise level, and where they are kept."""
        anchor = (self.donor or self.template).nearest(sigma)
        key = (anchor, layer)
        if key not in self._held:
            # Noise levels fall: what was made for another anchor is not needed again.
            self._held = {k: held for k, held in self._held.items() if k[0] == anchor}
            self._held[key] = self._fetch(anchor, layer)
        return key, self._held[key]

    def _note(self, layer: int, verdict: Verdict, lists: KeyLists) -> None:
        use = self.report[layer]
        use.calls += 1
        for i, name in enumerate(SOURCES):
            use.heads[name] += int((verdict.source == i).sum())
        use.density += (lists.density - use.density) / use.calls
        sparse = verdict.source != DENSE
        if bool(sparse.any()):
            least = float(verdict.recall[sparse].min())
            use.least_recall = min(least, use.least_recall or 1.0)

    def _fetch(self, anchor: int, layer: int) -> _Held | None:
        template = self.template.layer(anchor, layer)
        if self.donor is None:
            if layer in dense_layers([0.0] * self.layers):
                return None
            own, sparse = template, torch.ones(self.heads, dtype=torch.bool)
        else:
            if layer in self._stays_dense(anchor):
                return None
            found = self.donor.layer(anchor, layer)
            if found is None:
                return None
            own, sparse = found.mask, found.sparse
        fused = fuse(own, self.layout, self.target)
        union = fused | template
        sparse = sparse & (fused.float().mean((1, 2)) <= self.most)
        if not bool(sparse.any()):
            return None
        return _Held(fused, union, torch.where(sparse, 0, DENSE))

    def _stays_dense(self, anchor: int) -> frozenset[int]:
        if anchor not in self._dense and self.donor is not None:
            found = (self.donor.layer(anchor, i) for i in range(self.layers))
            self._dense[anchor] = dense_layers([1.0 if f is None else density(f) for f in found])
        return self._dense[anchor]


def density(layer: Layer) -> float:
    """The mean density of a layer's heads, 1 for those that are dense."""
    each = torch.where(layer.sparse, layer.mask.float().mean((1, 2)), 1.0)
    return float(each.mean())
