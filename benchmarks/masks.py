"""Whose block masks serve a changed request best? ``python -m benchmarks.masks [--quick]``

At equal density (``mask_sources.py``): the mask observed on the donor, the mean of other runs of
the backbone (template), another request's with another noise (random), predicted anew from the
target's own pooled queries and keys at every evaluation (online), nearness in space and time
(radial), and the best there is (exact).

On the trained bundled backbones, with blocks of eight tokens: the share of exact attention that
falls inside (recall), the relative error of attention's output, and the PSNR of the clip against
the target's own dense run, where every evaluation from the third on and every layer but the first
attends under the mask. Then, as the engine does it, masks tried on the run and kept only where
they hold: the PSNR of hits with connectivity reuse against that of the same hits without.

On a Wan of real width with 8,192 tokens (``joint_model.py``), recall alone: with random weights,
and with attention that is local by construction.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from carnator.connectivity import anchor_steps
from carnator.demo import captions, families, host, quality
from carnator.demo.model import EmbeddedModel
from carnator.request import Settings
from carnator.sparse import FIRST
from carnator.store import Store

from . import mask_sources as sources
from .batch import WORD_KINDS, Pair, held_out_pairs
from .command import command, save
from .mask_sources import SOURCES, Observed, Seen
from .mask_wide import wide

STEPS = 20
DENSITIES = (0.25, 0.5)
CLIP_DENSITY = 0.5  # the only one at which clips are made
PAIRS, QUICK_PAIRS = 10, 2  # ten: two of each kind of word
TEMPLATE_RUNS = 8
SEED = 5
LOOKED_AT = 4  # evaluations of a run at which recall and error are taken


class Study:
    """One backbone: what is known before any target is looked at."""

    def __init__(self, model: EmbeddedModel, runs: int):
        self.model = model
        self.levels = host.simple_sigmas(STEPS)
        self.anchors = list(anchor_steps(self.levels[:-1].tolist()))
        self.at = sources.layout_for(model, model.family.shape)
        self.layers = sources.steps_layers(model)
        rng = random.Random(f"carnator masks {SEED}")
        others = [(captions.random_caption(rng), rng.randrange(2**32)) for _ in range(runs + 1)]
        observed = [self.observed(*other) for other in others]
        self.template = sources.template(observed[1:])
        self.stranger = observed[0].scores

    def observed(self, caption: captions.Caption, seed: int) -> Observed:
        return sources.observed(self.model, caption, seed, self.levels, self.anchors)

    def masks(
        self, source: str, density: float, step: int, layer: int, q: Tensor, k: Tensor,
        donor: Observed,
    ) -> Tensor:  # fmt: skip
        """The mask [H, blocks, blocks] of a source for q, k [H, N, D] of an evaluation."""
        scale = q.shape[-1] ** -0.5
        if source == "online":
            scores = sources.block_scores(q, k, self.at, scale)
        elif source == "exact":
            scores = sources.exact_mass(q, k, self.at, scale)
        elif source == "radial":
            scores = sources.radial(self.at, len(q))
        else:
            held = {"donor": donor.scores, "template": self.template, "random": self.stranger}
            scores = held[source][sources.nearest_step(step, self.levels, self.anchors)][layer]
        return sources.kept(scores, self.at, density)

    def target(self, pair: Pair, densities: Sequence[float], bar: tqdm) -> list[dict[str, Any]]:
        """Rows of one pair: a source at a density each."""
        donor = self.observed(pair.donor, pair.seed)
        before, dense = sources.run(self.model, pair.target, pair.seed, self.levels, lambda _: None)
        clip = self.model.family.to_clip(dense[0])
        found = self.fits(pair, donor, before, densities)
        bar.update()
        rows = []
        for (source, density), (recall, error) in found.items():
            row = {"kind": pair.kind, "source": source, "density": density}
            row |= {"recall": recall, "error": error}
            if density == CLIP_DENSITY:
                made = self.sparse(pair, donor, source, density)
                row["clip_db"] = quality.psnr(self.model.family.to_clip(made[0]), clip)
                bar.update()
            rows.append(row)
        return rows

    @torch.no_grad()
    def fits(
        self, pair: Pair, donor: Observed, before: Sequence[Tensor], densities: Sequence[float]
    ) -> dict[tuple[str, float], tuple[float, float]]:
        """Mean recall, and mean relative error of attention's output, by source and density, over
        all layers but the first and some evaluations of the dense run."""
        seen: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
        cond = captions.embed(pair.target)[None]
        for step in torch.linspace(FIRST, STEPS - 1, LOOKED_AT).long().tolist():

            def show(layer: int, q: Tensor, k: Tensor, v: Tensor, step: int = step) -> None:
                if not layer:
                    return
                mass = sources.exact_mass(q, k, self.at, q.shape[-1] ** -0.5)
                exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
                for density in densities:
                    for source in SOURCES:
                        mask = self.masks(source, density, step, layer, q, k, donor)
                        over = sources.over_tokens(mask, self.at)
                        made = sources.masked_attention(q[None], k[None], v[None], over)[0]
                        error = float((made - exact).norm() / exact.norm())
                        recall = float((mass * mask).sum(-1).mean())
                        seen[source, density].append((recall, error))

            watch = Seen(len(self.layers), show)
            self.model.branches(before[step], float(self.levels[step]), cond, None, None, watch)
        means = {}
        for key, values in seen.items():
            recalls, errors = zip(*values, strict=True)
            means[key] = (statistics.fmean(recalls), statistics.fmean(errors))
        return means

    def sparse(self, pair: Pair, donor: Observed, source: str, density: float) -> Tensor:
        """The latent of the target with masks of a source from the third evaluation on."""

        def override(step: int) -> Seen | None:
            if step < FIRST:
                return None

            def instead(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
                if not layer:
                    return None
                mask = self.masks(source, density, step, layer, q[0], k[0], donor)
                over = sources.over_tokens(mask, self.at)
                return sources.masked_attention(q, k, v, over)

            return Seen(len(self.layers), instead=instead)

        return sources.run(self.model, pair.target, pair.seed, self.levels, override)[1]


def verified(model: EmbeddedModel, pairs: Sequence[Pair], bar: tqdm) -> list[dict[str, Any]]:
    """Hits by the engine with and without connectivity reuse: a row each."""
    rows = []
    reuse = {"sparse": "auto", "attention": "gather"}
    for pair in pairs:
        with tempfile.TemporaryDirectory() as folder, Store(folder) as store:

            def made(
                caption: captions.Caption,
                pair: Pair = pair,
                store: Store | None = store,
                **asked: str,
            ) -> host.Result:
                settings = None if store is None else Settings("custom", 20.0, **asked)  # type: ignore[arg-type]
                return host.generate(model, caption, seed=pair.seed, settings=settings, store=store)

            made(pair.donor, **reuse)
            store.flush()
            dense = made(pair.target, store=None)
            plain, both = made(pair.target), made(pair.target, **reuse)
        bar.update()
        if plain.report is None or both.report is None or both.report.sparse is None:
            continue
        if plain.report.decision != "hit" or both.report.evaluations != plain.report.evaluations:
            continue
        said = both.report.sparse
        heads = sum(sum(use.heads.values()) for use in said.layers)
        ran = sum(use.heads["fused"] + use.heads["union"] for use in said.layers)
        recalls = [u.least_recall for u in said.layers if u.least_recall is not None]
        rows.append(
            {
                "kind": pair.kind,
                "evaluations": both.report.evaluations,
                "trajectory_db": quality.psnr(plain.clip, dense.clip),
                "both_db": quality.psnr(both.clip, dense.clip),
                "heads_tried": heads,
                "heads_sparse": ran,
                "least_recall": min(recalls) if recalls else None,
            }
        )
    return rows


def summary(rows: Sequence[dict[str, Any]], hits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means by density and source, and the donor's mask against the template, pair by pair."""
    found: dict[str, Any] = {}
    for density in dict.fromkeys(r["density"] for r in rows):
        by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            if row["density"] == density:
                by_source[row["source"]].append(row)
        means = {
            source: {
                key: round(statistics.fmean(r[key] for r in own), 4)
                for key in ("recall", "error", "clip_db")
                if key in own[0]
            }
            for source, own in by_source.items()
        }
        pairs = list(zip(by_source["donor"], by_source["template"], strict=True))
        for key in ("recall", "clip_db"):
            gaps = [a[key] - b[key] for a, b in pairs if key in a]
            if not gaps:
                continue
            spread = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
            means[f"donor_over_template_{key}"] = {
                "mean": round(statistics.fmean(gaps), 4),
                "standard_error": round(spread, 4),
            }
        found[str(density)] = means
    if hits:
        losses = [h["trajectory_db"] - h["both_db"] for h in hits]
        recalls = [h["least_recall"] for h in hits if h["least_recall"] is not None]
        found["hits"] = {
            "count": len(hits),
            "mean_loss_db": round(statistics.fmean(losses), 3),
            "worst_loss_db": round(max(losses), 3),
            "least_recall": round(min(recalls), 4) if recalls else None,
            "heads_sparse": round(
                sum(h["heads_sparse"] for h in hits) / max(1, sum(h["heads_tried"] for h in hits)),
                4,
            ),
        }
    return found


def table(found: dict[str, Any]) -> str:
    lines = [f"{'density':<9}{'source':<10}{'recall':>8}{'error':>8}{'clip dB':>9}"]
    for density, means in found.items():
        for source in SOURCES if density != "hits" else ():
            m = means[source]
            clip = f"{m['clip_db']:>9.2f}" if "clip_db" in m else ""
            lines.append(f"{density:<9}{source:<10}{m['recall']:>8.3f}{m['error']:>8.3f}{clip}")
    if "hits" in found:
        lines.append(f"hits: {found['hits']}")
    return "\n".join(lines)


def study(name: str, count: int, quick: bool, bar: tqdm) -> dict[str, Any]:
    model = EmbeddedModel.load(families.named(name).path)
    drawn = held_out_pairs(SEED, WORD_KINDS, -(-count // len(WORD_KINDS)))
    pairs = sorted(drawn, key=lambda p: [q for q in drawn if q.kind == p.kind].index(p))[:count]
    known = Study(model, 2 if quick else TEMPLATE_RUNS)
    densities = DENSITIES[1:] if quick else DENSITIES
    rows = [row for pair in pairs for row in known.target(pair, densities, bar)]
    hits = verified(model, pairs, bar)
    found = summary(rows, hits)
    bar.write(f"{name}\n{table(found)}")
    return {"summary": found, "rows": rows, "hits": hits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two pairs, one density, narrower")
    parser.add_argument("--backbone", choices=(*families.FAMILIES, "all"), default="all")
    parser.add_argument("--pairs", type=int, help="changed requests of each backbone")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_flush_denormal(True)
    count = chosen.pairs or (QUICK_PAIRS if chosen.quick else PAIRS)
    names = list(families.FAMILIES) if chosen.backbone == "all" else [chosen.backbone]
    each = count * (len(SOURCES) + 2)
    with tqdm(total=each * len(names), unit="run") as bar:
        found = {name: study(name, count, chosen.quick, bar) for name in names}
        real = wide(chosen.quick)
    for row in real:
        print(row)
    data = {
        "command": command("masks"),
        "backbones": found,
        "wide": real,
        "summary": {name: study["summary"] for name, study in found.items()},
    }
    if chosen.json:
        save(chosen.json, data)


if __name__ == "__main__":
    main()
