"""Between a run's attention and the store: masks in a record, and records whose masks may serve."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .connectivity import Geometry, Layout, MaskError, Packed, Recorder, Shared, Static, Template
from .ranking import Ranking
from .store import Draft, Entry, RecordError, Store

if TYPE_CHECKING:
    from .engine import Run

log = logging.getLogger("carnator")

MASKS = "masks"  # the tensor of a record that holds its masks, and the word of its meta for it
TEMPLATE_OF = 3  # records whose majority is the template
LISTED = 256  # the newest records that are looked through for masks of the same backbone
Found = list[tuple[Entry, bytes]]


def joined(draft: Draft, recorder: Recorder, sigmas: Sequence[float]) -> Draft:
    """A record to come with masks of attention; they are packed in the background."""
    encode = draft.encode or (lambda: draft.tensors)

    def encoded() -> dict[str, Tensor]:
        return {**encode(), MASKS: packed(recorder, sigmas)}

    return replace(draft, meta={**draft.meta, MASKS: True}, encode=encoded)


def packed(recorder: Recorder, sigmas: Sequence[float]) -> Tensor:
    """What was observed, as uint8 [bytes]; a single zero, which no reader takes for masks, where
    it cannot be packed."""
    try:
        data = recorder.pack(sigmas, Static(recorder.layout, recorder.geometry.heads))
    except Exception as error:  # the rest of the record is good
        log.info("[Carnator] masks are not recorded: %s", error)
        data = b"\0"
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def read(store: Store, entry: Entry) -> bytes | None:
    """The packed masks of a record, unchecked; None where it has none."""
    if entry.meta.get(MASKS) is not True:
        return None
    try:
        data = store.read(entry.id, [MASKS])[MASKS]
    except RecordError:
        return None  # the store has dropped it and said so
    return data.numpy().tobytes() if data.dtype == torch.uint8 else None


def find(run: Run, shape: Sequence[int]) -> Found:
    """Records with masks that may serve a run: the donor of its trajectory first, then those of
    other runs of the same architecture and latent shape, the likest first."""
    assert run.store is not None
    donor = run.match.donor if run.match is not None and run.match.accepted else None
    others = [
        entry
        for entry in run.store.entries()[:LISTED]
        if entry.meta.get(MASKS) is True
        and entry.meta.get("architecture") == run.request.architecture
        and entry.meta.get("shape") == list(shape)
        and (donor is None or entry.id != donor.id)
    ]
    found: Found = []
    for entry in [*([] if donor is None else [donor]), *likest(others, run)]:
        data = read(run.store, entry)
        if data is not None:
            found.append((entry, data))
        if len(found) > TEMPLATE_OF:
            break
    return found


def likest(entries: list[Entry], run: Run) -> list[Entry]:
    """Records in the order of their signatures' distance from the run's."""
    own = None if run.probe is None else run.probe.signature
    if own is None:
        return entries
    known = [e for e in entries if e.signature.size == own.size]
    if not known:
        return entries
    distances = Ranking([e.signature for e in known]).distances(own)
    return [known[i] for i in distances.argsort(kind="stable")]


def fitting(
    found: Found, at: Layout, layers: int, heads: int
) -> tuple[Entry, Packed, Template] | None:
    """The first record whose masks are of this backbone and size, and the template that stands in
    for it: the majority of the others, or a static one."""
    geometry, static = Geometry.of(at, layers, heads), Static(at, heads)
    fit: list[tuple[Entry, Packed]] = []
    for entry, data in found:
        try:
            fit.append((entry, Packed(data, geometry, static)))
        except MaskError as error:
            log.info("[Carnator] masks of record %s are not used: %s", entry.id, error)
    if not fit:
        return None
    others = [masks for _, masks in fit[1 : 1 + TEMPLATE_OF]]
    return *fit[0], Shared(others) if others else static
