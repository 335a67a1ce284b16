"""What a store that grows costs: requests and matching with more and more records in it.

All records are in the partition of the requests, so that every match has all of them to search.
Two are of real runs. The others have the same form and size; their first derivatives and their
signatures are those of a real one with noise added, far enough off (a relative deviation of 0.04 to
0.36) to be worse donors than it, near enough to be looked at again at the second evaluation.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from carnator.demo import captions, host
from carnator.demo.model import EmbeddedModel, with_lora
from carnator.derivative import derivative
from carnator.matching import confirm, match
from carnator.request import Evaluation, Probe, Settings
from carnator.signature import AttentionProbe, signature
from carnator.store import PREVIEW, Draft, Entry, Store

from .batch import embedding
from .overhead import STRICTEST_DB
from .summary import show

PROMPT = "red circle left and blue square still on gray"
OTHER = "yellow triangle up on white"  # its run is refused, and recorded
SEED, LORA = 11, 0.03  # the LoRA is near enough to the recorded run for a hit
REPEATS, QUICK_REPEATS = 7, 3
MATCHES = 9
OFF = (0.2, 0.6)  # of the filling records: RMS of the noise relative to what it is added to
SPREAD = 0.5  # the same for signatures


def tensor_names(meta: dict[str, Any]) -> list[str]:
    """What ``recording.draft`` calls the tensors of a record."""
    later = [f"d.{i}" for i in range(1, len(meta["sigmas"]))]
    return ["first", *later, *(f"g.{i}" for i in meta["guidance"][1:]), "final", PREVIEW]


class Filler:
    """Makes records that look like a real one."""

    def __init__(self, store: Store, entry: Entry):
        self.entry = entry
        self._tensors = store.read(entry.id, tensor_names(entry.meta))
        self._generator = torch.Generator().manual_seed(0)
        self._rng, self._made = np.random.default_rng(0), 0

    def draft(self) -> Draft:
        self._made += 1
        first = self._tensors["first"].float()
        off = self._rng.uniform(*OFF) * float(first[0].square().mean().sqrt())
        noise = torch.randn(first.shape[1:], generator=self._generator)
        # The same for both guidance branches: guidance does not enlarge it.
        tensors = {**self._tensors, "first": (first + off * noise).to(torch.float16)}
        vector = self.entry.signature.astype(np.float32)
        vector = vector + SPREAD * vector.std() * self._rng.standard_normal(len(vector))
        meta = {**self.entry.meta, "label": f"filling {self._made}"}
        identity = f"{self._made:032x}"
        return Draft(self.entry.partition, identity, meta, tensors, vector.astype(np.float16))


@dataclass
class Workbench:
    """A model and the requests that are timed."""

    model: EmbeddedModel
    preset: str

    def __post_init__(self) -> None:
        self.near = with_lora(self.model, LORA)
        self.strict = Settings("custom", STRICTEST_DB)

    @cached_property
    def probe(self) -> tuple[Probe, Tensor, float]:
        """The first evaluation of a request for OTHER; the derivative of its second, and sigma."""
        noise, caption = host.seed_noise(SEED, self.model.family.shape), captions.parse(OTHER)
        levels = host.simple_sigmas(host.STEPS).tolist()
        seen = AttentionProbe()
        evaluation = self._evaluate(noise, levels[0], seen)
        made = signature(evaluation.denoised, evaluation.cond, evaluation.uncond, seen)
        request = host.make_request(
            self.model, caption, noise, cfg=host.CFG, sigmas=levels, seed=SEED, sampler="euler"
        )
        x = noise + derivative(noise, evaluation.denoised, levels[0]) * (levels[1] - levels[0])
        d = derivative(x, self._evaluate(x, levels[1]).denoised, levels[1])
        return Probe(request, noise, levels[0], evaluation, made), d, levels[1]

    @torch.no_grad()
    def _evaluate(self, x: Tensor, sigma: float, seen: AttentionProbe | None = None) -> Evaluation:
        cond, uncond = embedding(captions.parse(OTHER))[None], embedding(None)[None]
        observe = None if seen is None else seen.see
        positive, negative = self.model.branches(x, sigma, cond, uncond, observe)
        assert negative is not None
        return Evaluation(negative + (positive - negative) * host.CFG, positive, negative)

    def match(self, store: Store) -> None:
        """Both halves of a decision, as a run makes them."""
        probe, d, sigma = self.probe
        found = match(probe, self.strict, store)
        if found.decision == "candidate":
            confirm(found, d, sigma, self.strict, store)

    def measure(self, store: Store, filler: Filler, repeats: int) -> dict[str, Any]:
        """Milliseconds, medians of ``repeats`` turns, with the store as it is."""
        records = store.stats().records
        request = self.probe[0].request

        def forget() -> None:
            """The miss was recorded: take it out again."""
            for record in store.shelf(request.partition).same_request(request.identity):
                store.delete(record)

        def run(prompt: str, model: EmbeddedModel, settings: Settings | None) -> host.Result:
            what = captions.parse(prompt)
            return host.generate(model, what, seed=SEED, settings=settings, store=store)

        times: dict[str, list[float]] = {}

        def clocked(name: str, work: Callable[[], Any]) -> Any:
            began = time.perf_counter()
            out = work()
            times.setdefault(name, []).append(1000 * (time.perf_counter() - began))
            return out

        hits, quiet = 0, Settings(self.preset, record=False)
        for _ in range(repeats):
            clocked("dense_ms", lambda: run(OTHER, self.model, None))
            clocked("miss_ms", lambda: run(OTHER, self.model, self.strict))
            clocked("miss_writing_ms", store.flush)
            forget()
            result = clocked("hit_ms", lambda: run(PROMPT, self.near, quiet))
            hits += result.report.decision == "hit"
        for _ in range(MATCHES):
            clocked("match_ms", lambda: self.match(store))
        for _ in range(MATCHES):
            record = store.put(filler.draft())
            clocked("match_after_write_ms", lambda: self.match(store))
            store.delete(record)
        for _ in range(QUICK_REPEATS):
            self._first(store, clocked)
        medians = {name: round(statistics.median(found), 3) for name, found in times.items()}
        if hits < repeats:
            medians["hit_ms"] = None  # type: ignore[assignment]
        return {"records": records, **medians, "store_mb": round(store.stats().bytes / 1e6, 1)}

    def _first(self, store: Store, clocked: Callable[[str, Callable[[], Any]], Any]) -> None:
        """The first match of a process: the store is opened, and all signatures are read."""

        def open_and_match() -> Store:
            opened = Store(store.folder)
            self.match(opened)
            return opened

        clocked("first_match_ms", open_and_match).close()


def grow(
    model: EmbeddedModel, preset: str, sizes: Sequence[int], quick: bool
) -> list[dict[str, Any]]:
    """A row for each size of the store (records, at least 2, rising)."""
    if any(a >= b for a, b in zip((1, *sizes), sizes)):
        raise ValueError(f"The store cannot grow through {list(sizes)}: use rising sizes from 2.")
    bench = Workbench(model, preset)
    rows: list[dict[str, Any]] = []
    if not sizes:
        return rows
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        settings = Settings(preset, reuse=False)
        for prompt in ("cyan square right on black", PROMPT):
            host.generate(model, captions.parse(prompt), seed=SEED, settings=settings, store=store)
        store.flush()
        entry = next(e for e in store.entries() if e.meta["label"] == PROMPT)
        filler = Filler(store, entry)
        with tqdm(total=max(sizes), initial=2, desc="growth", unit="record") as bar:
            for size in sizes:
                began = time.perf_counter()
                for _ in range(size - store.stats().records):
                    store.put(filler.draft())
                    bar.update()
                filled = time.perf_counter() - began
                bar.set_postfix_str("requests")
                row = bench.measure(store, filler, QUICK_REPEATS if quick else REPEATS)
                rows.append({**row, "filling_seconds": round(filled, 2)})
                bar.set_postfix_str("")
    return rows


COLUMNS = (
    ("dense_ms", "dense"),
    ("miss_ms", "miss"),
    ("hit_ms", "hit"),
    ("miss_writing_ms", "writing"),
    ("match_ms", "match"),
    ("match_after_write_ms", "after a write"),
    ("first_match_ms", "first of a process"),
)


def text(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a terminal, in milliseconds."""
    if not rows:
        return "growth was not measured"
    lines = [
        f"{'records':>8}{'MB':>8}" + "".join(f"{title:>20}" for _, title in COLUMNS) + "  (ms)"
    ]
    for row in rows:
        cells = "".join(f"{show(row[key]):>20}" for key, _ in COLUMNS)
        lines.append(f"{row['records']:>8}{row['store_mb']:>8.1f}{cells}")
    return "\n".join(lines)
