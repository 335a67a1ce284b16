"""A creator's session: one clip, then the small changes people make until they like it.

Every request is run with Carnator and, apart and outside the measured time, densely. Timings of
the two are taken in turns, so that a change in the machine's load hits both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..noise import bank_index
from ..report import Report
from ..request import Settings
from ..store import Store
from . import captions, host, quality
from .model import EmbeddedModel, with_lora

FIRST = "red circle left and blue square still on gray"
KINDS = ("first", "word", "cfg", "steps", "lora", "seed_keep", "seed_bank", "unrelated")
LORA_STRENGTH = 0.05


@dataclass(frozen=True)
class Wish:
    """One request of the session. ``kind`` is one of KINDS; ``lora`` is a strength, 0 for none."""

    name: str
    kind: str
    prompt: str
    seed: int
    steps: int
    cfg: float
    sampler: str = "euler"
    lora: float = 0.0
    policy: str = "keep"


@dataclass
class Outcome:
    """A wish, what Carnator made of it, and the wish's own dense run to compare with."""

    wish: Wish
    result: host.Result
    dense: host.Result
    seconds: float
    dense_seconds: float

    @property
    def report(self) -> Report:
        assert self.result.report is not None, "a session's runs all have a report"
        return self.result.report

    @property
    def decision(self) -> str:
        return "dense" if self.wish.kind == "first" else self.report.decision

    @property
    def psnr_db(self) -> float:
        """PSNR of the clip against the clip of the own dense run; 106 dB when equal."""
        return quality.psnr(self.result.clip, self.dense.clip)

    @property
    def attributes_right(self) -> float:
        return quality.attributes_right(self.result.clip, captions.parse(self.wish.prompt))

    @property
    def dense_attributes_right(self) -> float:
        return quality.attributes_right(self.dense.clip, captions.parse(self.wish.prompt))

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.wish.name,
            "kind": self.wish.kind,
            "decision": self.decision,
            "reason": self.report.reason,
            "evaluations": self.report.evaluations,
            "dense_evaluations": self.report.dense_evaluations,
            "seconds": round(self.seconds, 5),
            "dense_seconds": round(self.dense_seconds, 5),
            "psnr_db": round(self.psnr_db, 3),
            "attributes_right": round(self.attributes_right, 4),
        }


def same_bank_seed(seed: int) -> int:
    """The next seed that picks the same noise of the bank as ``seed``."""
    other = seed + 1
    while bank_index(other) != bank_index(seed):
        other += 1
    return other


def wishes(
    seed: int = 30, steps: int = host.STEPS, cfg: float = host.CFG, quick: bool = False
) -> list[Wish]:
    """The session's requests in order; ``quick`` leaves out all but one of each kind."""
    first = Wish("first clip", "first", FIRST, seed, steps, cfg)

    def change(name: str, kind: str, old: str = "", new: str = "", **fields: Any) -> Wish:
        return replace(first, name=name, kind=kind, prompt=FIRST.replace(old, new), **fields)

    words = [
        change("colour: red to green", "word", "red", "green"),
        change("shape: circle to triangle", "word", "circle", "triangle"),
        change("motion: still to up", "word", "still", "up"),
        change("colour: blue to yellow", "word", "blue", "yellow"),
        change("shape: square to circle", "word", "square", "circle"),
    ]
    in_bank = change("seed of the noise bank", "seed_bank", policy="bank")
    return [
        first,
        *words[: 1 if quick else None],
        change(f"CFG {cfg:g} to {cfg + 1:g}", "cfg", cfg=cfg + 1),
        change(f"steps {steps} to {steps * 4 // 5}", "steps", steps=steps * 4 // 5),
        change(f"LoRA of {LORA_STRENGTH:.0%}", "lora", lora=LORA_STRENGTH),
        change("new seed, own noise", "seed_keep", seed=seed + 1),
        in_bank,
        replace(
            in_bank,
            name="new seed, same bank noise",
            prompt=words[1].prompt,
            seed=same_bank_seed(seed),
        ),
        change("unrelated prompt", "unrelated", FIRST, "yellow triangle up on white"),
    ]


def play(
    model: EmbeddedModel,
    session: Sequence[Wish],
    store: Store,
    *,
    preset: str = "fast",
    repeats: int = 3,
    progress: Callable[[int], object] | None = None,
    before: Callable[[Wish], object] | None = None,
) -> list[Outcome]:
    """Run the session. ``progress`` is told how many more of ``planned_steps`` are
    done, ``before`` is called ahead of every wish.

    A hit records nothing, so it can be repeated and its seconds are the median of ``repeats``;
    a run that was recorded would be an exact hit the second time and is timed once.
    """
    patched: dict[float, EmbeddedModel] = {0.0: model}
    host.generate(model, captions.parse(session[0].prompt), steps=2)  # first-call costs
    outcomes = []
    for wish in session:
        if before is not None:
            before(wish)
        if wish.lora not in patched:
            patched[wish.lora] = with_lora(model, wish.lora)
        settings = Settings(preset=preset, noise_policy=wish.policy)
        current = patched[wish.lora]
        results = [_run(current, wish, progress, settings=settings, store=store)]
        store.flush()
        noise = results[0].noise
        dense = [_run(current, wish, progress, noise=noise)]
        for _ in range(repeats - 1):
            if not _recorded(results[0]):
                results.append(_run(current, wish, progress, settings=settings, store=store))
            elif progress is not None:
                progress(host.evaluation_count(wish.sampler, wish.steps))
            dense.append(_run(current, wish, progress, noise=noise))
        outcomes.append(
            Outcome(wish, results[0], dense[0], _median_seconds(results), _median_seconds(dense))
        )
    return outcomes


def planned_steps(session: Sequence[Wish], repeats: int) -> int:
    """What ``play`` tells ``progress`` in all."""
    return 2 * repeats * sum(host.evaluation_count(w.sampler, w.steps) for w in session)


def _run(
    model: EmbeddedModel,
    wish: Wish,
    progress: Callable[[int], object] | None,
    *,
    noise: Tensor | None = None,
    settings: Settings | None = None,
    store: Store | None = None,
) -> host.Result:
    return host.generate(
        model,
        captions.parse(wish.prompt),
        seed=wish.seed,
        noise=noise,
        cfg=wish.cfg,
        steps=wish.steps,
        sampler=wish.sampler,
        settings=settings,
        store=store,
        progress=progress,
    )


def _recorded(result: host.Result) -> bool:
    return result.report is not None and result.report.record == "submitted"


def _median_seconds(results: Sequence[host.Result]) -> float:
    return statistics.median(r.seconds for r in results)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Means over the accepted word tweaks, and over everything what else counts."""
    words = [o for o in outcomes if o.wish.kind == "word"]
    hits = [o for o in words if o.decision in ("hit", "exact")]
    accepted = [o for o in outcomes if o.decision in ("hit", "exact")]
    unrelated = [o for o in outcomes if o.wish.kind == "unrelated"]

    def mean(values: Sequence[float]) -> float | None:
        return round(statistics.fmean(values), 4) if values else None

    return {
        "requests": len(outcomes),
        "accepted": len(accepted),
        "word_tweaks": len(words),
        "word_tweaks_accepted": len(hits),
        "evaluation_ratio": mean([o.report.dense_evaluations / o.report.evaluations for o in hits]),
        "speed_up": mean([o.dense_seconds / o.seconds for o in hits]),
        "psnr_db": mean([o.psnr_db for o in hits]),
        "lowest_psnr_db": round(min(o.psnr_db for o in accepted), 4) if accepted else None,
        "attributes_right": mean([o.attributes_right for o in outcomes]),
        "dense_attributes_right": mean([o.dense_attributes_right for o in outcomes]),
        "unrelated_refused": all(o.decision == "miss" for o in unrelated),
        "seconds_saved": round(sum(o.dense_seconds - o.seconds for o in accepted), 4),
    }
