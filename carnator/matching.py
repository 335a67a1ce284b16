"""Is an earlier generation's computation valid here? Candidates, D0, D1, acceptance."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from torch import Tensor

from .derivative import Branches, derivative, relative_deviation
from .plan import Plan, probed
from .recording import first_derivative, load, sound
from .request import Probe, Request, Settings, digest
from .risk import RiskTable, table_for
from .samplers import contract, schedule_fault
from .signature import SHORTLIST
from .store import Entry, RecordError, Store
from .trajectory import same_sigma

log = logging.getLogger("carnator")

LOOKED_AT = 64  # records with the nearest signatures, for the few that can be donors
CEILING_D0 = 1.0  # first derivatives farther apart are not looked at again
EXACT_D0 = 5e-7  # float16 rounding of one branch of the first derivative stays below it


@dataclass(frozen=True)
class Match:
    """The verdict on one probe.

    ``decision`` is ``candidate`` (to be confirmed at the second evaluation), ``hit``, ``exact``,
    ``miss`` or ``dense``. ``plan`` is set for a hit. ``d0`` and ``d1`` are the relative deviations
    of the first and the second derivative from the best donor's, accepted or not; ``d0_map``
    [F, h, w] shows where the two first derivatives differ. ``donors`` are a candidate's, nearest
    first.
    """

    probe: Probe
    decision: str
    reason: str
    donor: Entry | None = None
    d0: float | None = None
    d1: float | None = None
    expected_db: float | None = None
    plan: Plan | None = None
    table: RiskTable | None = None
    donors: tuple[Entry, ...] = field(default=(), repr=False)
    d0_map: Tensor | None = field(default=None, repr=False)

    @property
    def accepted(self) -> bool:
        """Whether an earlier generation may be reused, as far as is known."""
        return self.decision in ("candidate", "hit", "exact")


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
    shelf = store.shelf(probe.request.partition)
    # A repeated request must be found whatever its signature's rank.
    same = shelf.same_request(probe.request.identity)[:1]
    near = shelf.nearest(probe.signature, LOOKED_AT)
    found: list[Entry] = []
    for record_id in dict.fromkeys([*same, *near]):
        e = store.entry(record_id)
        if (
            e is not None
            and sound(e)
            and e.meta["shape"] == list(probe.x.shape)
            and same_sigma(e.meta["sigmas"][0], probe.sigma)
            and 2 * len(set(e.meta["sigmas"])) >= levels
        ):
            found.append(e)
        if len(found) == SHORTLIST + len(same):
            break
    return found


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
    """What the first evaluation says: is this request's repetition in the store, and which earlier
    generations are to be looked at once more at the second?"""
    request = probe.request
    reason = blocked(settings, request, tuple(probe.x.shape))
    if reason is None and store is None:
        reason = "there is no store"
    if reason is not None or store is None:
        return refuse(probe, "dense", reason or "")
    d = derivative(probe.x, probe.evaluation.denoised, probe.sigma).float().cpu()
    ranked: list[tuple[float, Entry, Tensor]] = []
    repeated: set[str] = set()
    for entry in candidates(probe, store):
        try:
            first = first_derivative(entry, store)
        except RecordError:
            continue  # the store has dropped it and said so
        donor = first.at(request.cfg)
        if donor.shape == d.shape:
            ranked.append((relative_deviation(d, donor), entry, donor))
            if entry.identity == request.identity and repeats(probe, first, d):
                repeated.add(entry.id)
    if not ranked:
        return refuse(probe, "miss", "no earlier generation with this model, shape and noise")
    ranked.sort(key=lambda r: r[0])
    table = table_for(request.architecture)

    def found(decision: str, reason: str, chosen: tuple[float, Entry, Tensor]) -> Match:
        raw, entry, donor = chosen
        d0_map = (d - donor).square().mean(1)[0]
        if d0_map.ndim == 2:
            d0_map = d0_map[None]
        d0 = on_flow_scale(raw, probe.sigma)
        return Match(probe, decision, reason, entry, d0, table=table, d0_map=d0_map)

    for chosen in ranked if settings.exact_hits else ():
        if chosen[1].id in repeated:
            return found("exact", "the same request was generated before", chosen)
    best = found("miss", "", ranked[0])
    assert best.d0 is not None
    if best.d0 > CEILING_D0:
        why = f"no earlier generation is near enough (D0 {best.d0:.3g} is beyond {CEILING_D0:g})"
        return replace(best, reason=why)
    why = f"D0 {best.d0:.3g}, to be confirmed at the second evaluation"
    donors = tuple(entry for _, entry, _ in ranked)
    return replace(best, decision="candidate", reason=why, donors=donors)


def repeats(probe: Probe, first: Branches, d: Tensor) -> bool:
    """Whether a record's first evaluation is the probe's own, but for how it was stored.

    Each branch is compared alone: guidance u + cfg (c - u) would amplify the rounding of both,
    and a bound for that would let real changes through. ``d`` is the guided derivative.
    """
    seen = probe.evaluation
    pairs = [(d, first.cond)]
    if first.uncond is not None:
        if seen.cond is None or seen.uncond is None:
            return False
        branches = (derivative(probe.x, b, probe.sigma) for b in (seen.cond, seen.uncond))
        pairs = list(zip((b.float().cpu() for b in branches), (first.cond, first.uncond)))
    return all(relative_deviation(a, b) <= EXACT_D0 for a, b in pairs)


def on_flow_scale(deviation: float, sigma: float) -> float:
    """The risk tables speak of d = noise - clean. Above sigma 1 the clean part of d fades with
    1 / sigma, and its differences have to be brought back to that scale."""
    return deviation * max(1.0, sigma) ** 2


def confirm(
    found: Match, d: Tensor, sigma: float, settings: Settings, store: Store | None
) -> Match:
    """Decide on a candidate by the second derivative d [1, C, ...] of the run, at ``sigma``.

    The first one is made of pure noise, where a model says little beyond the mean of its
    answers; only at the second do the paths of request and donor show how far apart they are.
    """
    request = found.probe.request
    table = found.table or table_for(request.architecture)
    best: tuple[float, Entry] | None = None
    d = d.float().cpu()
    for entry in found.donors if store is not None else ():
        try:
            assert store is not None
            donor = load(store, entry, [sigma], cfg=request.cfg)[0].at(sigma, request.cfg)
        except (RecordError, ValueError):
            continue  # dropped, or made on a schedule that says nothing here
        if donor.shape == d.shape:
            d1 = on_flow_scale(relative_deviation(d, donor), sigma)
            if best is None or d1 < best[0]:
                best = (d1, entry)
    if best is None:
        return replace(found, decision="miss", reason="the donor's record was dropped")
    d1, entry = best
    rule = contract(request.sampler, request.sampler_options)
    calls = rule.calls(request.sigmas)
    found = replace(found, donor=entry, d1=d1, donors=())
    rows = []
    for changed in ("", *changes(request, entry)):
        kind = f"{rule.kind}{changed}"
        wanted = (kind, len(calls), d1, settings.budget, settings.loose)
        chosen = table.choose(*wanted)
        if chosen is None:
            why = f"no earlier generation is near enough ({table.refusal(*wanted)})"
            return replace(found, decision="miss", reason=why)
        rows.append(chosen)
    row = max(rows, key=lambda r: r.evaluations)
    reason = f"the second evaluation is near enough to an earlier one's (D1 {d1:.3g})"
    return replace(
        found,
        decision="hit",
        reason=reason,
        expected_db=min(table.trusted_db(r, d1, settings.loose) for r in rows),
        plan=probed(calls, row.evaluations, row.late),
    )


def changes(request: Request, donor: Entry) -> list[str]:
    """The parts of rows' names for what is known to differ from the donor: the same D1 means
    another risk where the guidance scale or the schedule changed. The prompt may have changed
    besides, so that the rows without such a part count too."""
    out = ["+cfg"] if donor.meta["cfg"] != request.cfg else []
    made, asked = set(donor.meta["sigmas"]), {s for s in request.sigmas if s > 0}
    same = len(made) == len(asked) and all(
        same_sigma(a, b) for a, b in zip(sorted(made), sorted(asked), strict=True)
    )
    return out if same else [*out, "+schedule"]
