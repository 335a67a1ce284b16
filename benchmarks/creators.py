"""Creators' sessions for ``benchmarks.session``: twelve requests each, drawn by chance.

A session is a first clip and eleven changes of it, in an order drawn by chance. Words change as in
``benchmarks.pairs``, one at a time, and the change stays. CFG, step count and LoRA change too; half
of these changes stay, the others are taken back with the next request. In every second session one
earlier request is made once more, exactly, and the session goes on from there. Captions are drawn
from all there are.

=========  ======================================================================================
``fixed``  one seed: every kind of word once and two or three words more, a CFG, a step count, a
           LoRA
``keep``   the same with another seed for every request, each with its own noise, and once the
           seed changes alone
``bank``   the same as ``keep``, with the noise of the bank
``mixed``  one seed, so that every request has donors to look at; four unrelated prompts, half of
           which the session goes on from, five or six words, and one of CFG, step count and LoRA
=========  ======================================================================================
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from carnator.demo import captions, host
from carnator.demo.captions import Caption

from .batch import WORD_KINDS
from .pairs import CFGS, LORAS, STEP_COUNTS

SESSION_SEED = 5
LENGTH = 12
UNRELATED = 4
KINDS = ("fixed", "keep", "bank", "mixed")
SETTINGS = ("cfg", "steps", "lora")
OPTIONS: dict[str, tuple[float, ...]] = {
    "cfg": (host.CFG, *CFGS),
    "steps": (host.STEPS, *STEP_COUNTS),
    "lora": (0.0, *LORAS),
}
TRIES = 20  # at a request that was not made before


@dataclass(frozen=True)
class Ask:
    """One request. ``change`` is what it changes: ``first``, a kind of word, ``cfg``, ``steps``,
    ``lora`` (a strength, 0 for none), ``seed``, ``unrelated``, or ``repeat``."""

    change: str
    caption: Caption
    seed: int
    policy: str = "keep"
    cfg: float = host.CFG
    steps: int = host.STEPS
    lora: float = 0.0

    def asks_for(self) -> tuple:
        """All but why it is made."""
        return (self.caption, self.seed, self.policy, self.cfg, self.steps, self.lora)


def changes(kind: str, index: int, rng: random.Random) -> list[str]:
    """The eleven changes of a session, in their order."""
    repeats = ["repeat"] * (index % 2 == 0)
    if kind == "mixed":
        made = ["unrelated"] * UNRELATED + [SETTINGS[index % len(SETTINGS)], *WORD_KINDS]
    else:
        made = [*WORD_KINDS, *SETTINGS] + ["seed"] * (kind != "fixed")
    made += repeats
    made += rng.sample(WORD_KINDS, LENGTH - 1 - len(made))
    rng.shuffle(made)
    return made


def changed(ask: Ask, change: str, rng: random.Random) -> Ask:
    """The request with one change; words, settings and prompts only."""
    if change in SETTINGS:
        options = [o for o in OPTIONS[change] if o != getattr(ask, change)]
        return replace(ask, change=change, **{change: rng.choice(options)})  # type: ignore[arg-type]
    return replace(ask, change=change, caption=captions.tweak(ask.caption, change, rng))


def drawn(kind: str, index: int, seed: int = SESSION_SEED) -> list[Ask]:
    """Session number ``index`` of a kind; the same on every machine."""
    if kind not in KINDS:
        raise ValueError(f"Unknown kind of session {kind!r}: use one of {', '.join(KINDS)}.")
    rng = random.Random(f"carnator session {seed} {kind} {index}")
    new_seeds = kind in ("keep", "bank")
    policy = "bank" if kind == "bank" else "keep"
    current = Ask("first", captions.random_caption(rng), rng.randrange(2**32), policy)
    asks = [current]
    for change in changes(kind, index, rng):
        if change == "repeat":
            current = replace(rng.choice(asks), change="repeat")
            asks.append(current)
            continue
        base = replace(current, seed=rng.randrange(2**32)) if new_seeds else current
        before = {a.asks_for() for a in asks}
        for _ in range(TRIES):
            ask = replace(base, change="seed") if change == "seed" else changed(base, change, rng)
            if ask.asks_for() not in before:
                break
        asks.append(ask)
        passing = change in SETTINGS or change == "unrelated"
        if not passing or rng.random() < 0.5:
            current = ask
    return asks
