"""Is an earlier generation's computation valid here? Candidates, exact D0, acceptance."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from .derivative import derivative, relative_deviation
from .plan import Plan, spaced
from .recording import first_derivative, sound
from .request import Probe, Request, Settings, digest
from .risk import RiskTable, table_for
from .samplers import contract, schedule_fault
from .signature import shortlist
from .store import Entry, RecordError, Store
from .trajectory import same_sigma

log = logging.getLogger("carnator")

EXACT_D0 = 5e-7  # float16 rounding of one branch of the first derivative stays below it


@dataclass(frozen=True)
class Match:
    """The verdict on one probe. ``plan`` is set for a hit; ``d0`` is that of the best candidate,
    accepted or not; ``d0_map`` [F, h, w] shows where the two first derivatives differ."""

    probe: Probe
    decision: str
    reason: str
    donor: Entry | None = None
    d0: float | None = None
    expected_db: float | None = None
    plan: Plan | None = None
    table: RiskTable | None = None
    d0_map: Tensor | None = field(default=None, repr=False)

    @property
    def accepted(self) -> bool:
        return self.decision in ("hit", "exact")


def refuse(probe: Probe, decision: str, reason: str) -> Match:
    return Match(probe, decision, reason)


def blocked(settings: Settings, request: Request, shape: tuple[int, ...]) -> str | None:
    """Why reuse is not tried at all for a request, or None."""
    if not settings.reuse:
        return "reuse is switched off"
    if len(shape) not in (4, 5) or shape[0] != 1:
        return f"latents of shape {list(shape)}: only one clip at a time is reused"
    rule = contract(request.sampler, request.sampler_options)
    if rule.kind == "refused":
        return f"the sampler {request.sampler!r} runs dense: {rule.why}"
    return schedule_fault(request.sigmas)


def candidates(probe: Probe, store: Store) -> list[Entry]:
    """Shortlisted donors of the probe's partition that start at its sigma, share its shape and
    know at least half as many noise levels: a coarser path strays, whatever its D0."""
    levels = sum(s > 0 for s in probe.request.sigmas)
    entries = [
        e
        for e in store.entries(probe.request.partition)
        if sound(e)
        and e.meta["shape"] == list(probe.x.shape)
        and same_sigma(e.meta["sigmas"][0], probe.sigma)
        and 2 * len(set(e.meta["sigmas"])) >= levels
    ]
    # A repeated request must be found whatever its signature's rank.
    same = [e for e in entries if e.identity == probe.request.identity]
    near = shortlist(probe.signature, [e.signature for e in entries])
    return same[-1:] + [entries[i] for i in near if entries[i] not in same[-1:]]


def may_use_bank_noise(request: Request, store: Store | None) -> bool:
    """Whether a request may start from the bank noise its hard keys name.

    Not if another seed has asked for the same from that noise: who changes only the seed asks for
    a different clip. The first to ask keeps the noise, so repeating a request changes nothing.
    """
    if store is None:
        return True
    name = f"{request.twin}.{digest({'noise': request.hard.get('noise', '')})}"
    return store.claim(name, str(request.seed)) == str(request.seed)


def match(probe: Probe, settings: Settings, store: Store | None) -> Match:
    """Find the best donor by exact D0 and the cheapest plan that keeps the user's budget."""
    request = probe.request
    reason = blocked(settings, request, tuple(probe.x.shape))
    if reason is None and store is None:
        reason = "there is no store"
    if reason is not None or store is None:
        return refuse(probe, "dense", reason or "")
    d = derivative(probe.x, probe.evaluation.denoised, probe.sigma).float().cpu()
    best: tuple[float, Entry, Tensor] | None = None
    for entry in candidates(probe, store):
        try:
            first = first_derivative(entry, store)
        except RecordError:
            continue  # the store has dropped it and said so
        donor = first.at(request.cfg)
        if donor.shape != d.shape:
            continue
        # Recombined at the target's CFG the branches of one prompt agree, however far the paths
        # part: the donor's own path is what the difference grows from.
        own = first.at(float(entry.meta["cfg"]))
        d0 = max(relative_deviation(d, donor), relative_deviation(d, own))
        if best is None or d0 < best[0]:
            best = (d0, entry, donor)
    if best is None:
        return refuse(probe, "miss", "no earlier generation with this model, shape and noise")
    raw, entry, donor = best
    # The tables speak of d = noise - clean. Above sigma 1 the clean part of d fades with 1 / sigma,
    # and its differences have to be brought back to that scale.
    d0 = raw * max(1.0, probe.sigma) ** 2
    table = table_for(request.architecture)
    d0_map = (d - donor).square().mean(1)[0]
    if d0_map.ndim == 2:
        d0_map = d0_map[None]
    found = partial(Match, probe, donor=entry, d0=d0, table=table, d0_map=d0_map)
    # Guidance u + cfg (c - u) amplifies the rounding of both branches.
    rounding = EXACT_D0 * (request.cfg**2 + (request.cfg - 1) ** 2)
    if settings.exact_hits and entry.identity == request.identity and raw <= rounding:
        return found("exact", "the same request was generated before")
    rule = contract(request.sampler, request.sampler_options)
    calls = rule.calls(request.sigmas)
    row = table.choose(rule.kind, len(calls), d0, settings.budget)
    if row is None:
        why = table.refusal(rule.kind, len(calls), d0, settings.budget)
        return found("miss", f"no earlier generation is near enough ({why})")
    plan = spaced(calls, row.evaluations, row.late)
    return found("hit", f"D0 {d0:.3g}", expected_db=table.lower_db(row, d0), plan=plan)
