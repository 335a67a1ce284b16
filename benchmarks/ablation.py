"""What is each part of Carnator worth?

``python -m benchmarks.ablation [--quick] [--backbone all] [--json PATH] [--plot PATH]``

Held-out word tweaks, each to be run from one of 32 dense runs with the same noise: that of the
request it was changed from, those of other targets, and of random captions
(``benchmarks.donors``). Every row changes one thing (``benchmarks.variants``) and gives the latent
PSNR against the target's own dense run at 8 and at 10 evaluations of 30, whatever the acceptance
would say. 30 Euler steps, CFG 4, shift 5.

The summary, per backbone:

- ``rows``: mean and tenth percentile over all targets, and over the half whose donor is nearest by
  D1 (``near``: the ones that can be accepted). ``delta_db`` is the mean difference from the
  shipped form, the first row of each part, ``delta_error_db`` its standard error over targets.
- ``signature``: share of the targets whose donor of least D1 is in the shortlist of four, with
  each part of the Early Signature left out, and alone; beside it shortlists by D0 and by text, and
  by chance. ``excess`` is by how many powers of ten the best D1 in the shortlist exceeds the least.
- ``decision``: how D0 and D1 rank runs. Spearman's correlation of -log D with the PSNR at ten
  evaluations, and, with the share accepted the same for both, the share of accepted ones below
  31 dB. Over the runs of all rows of the part ``donor``, each target and donor once.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from carnator.demo.model import EmbeddedModel
from carnator.risk import PRESETS
from carnator.signature import SHORTLIST

from .batch import latent_peak, psnr_each
from .command import command, options, save
from .donors import CHOICES, Shelf, signature_parts, targets
from .fidelity import models
from .metrics import CAP_DB
from .summary import low, show
from .variants import GUIDANCE, VARIANTS, Variant

COUNTS = (8, 10)
DONORS = 32
SHELVES, ON_SHELF, QUICK_ON_SHELF = 4, 8, 5
SHARES = (0.25, 0.5, 0.75)
FLOOR_DB = PRESETS["balanced"]


class Results:
    """What all shelves gave: dB [targets] of every variant and count; ``nearness`` is log10 of the
    D1 of each target's donor."""

    def __init__(self) -> None:
        self.db: dict[tuple[str, str, int], list[float]] = {}
        self.donors = 0
        self.nearness: list[float] = []
        self.recall: dict[str, list[float]] = {}
        self.excess: dict[str, list[float]] = {}
        self.judged: list[tuple[float, float, float]] = []  # D0, D1, dB at the last count

    def add(self, shelf: Shelf, bar: tqdm | None = None) -> None:
        """Measure every variant on a shelf."""
        donors, self.donors = shelf.chosen(), len(shelf.donors)
        rows = np.arange(len(donors))
        self.nearness += np.log10(shelf.d1[rows, donors]).tolist()
        done: dict[tuple, list[float]] = {}
        for variant in VARIANTS:
            for count in COUNTS:
                # The shipped form heads several parts, and is run once.
                first = variant.part != GUIDANCE and variant == heads()[variant.part]
                key = ("shipped", count) if first else (variant, count)
                if key not in done:
                    done[key] = decibels(shelf, variant, count, donors)
                name = (variant.part, variant.name, count)
                self.db.setdefault(name, []).extend(done[key])
                if bar is not None:
                    bar.update(len(donors))
        self._rank(shelf)
        self._judge(shelf, done)

    def _rank(self, shelf: Shelf) -> None:
        """Which shortlists hold the donor with the least D1?"""
        length = len(shelf.signatures[0][0])
        parts = signature_parts(shelf.targets.noise.shape, length)
        lists = {"whole signature": shelf.shortlists()}
        for name, place in parts.items():
            alone = np.zeros(length, bool)
            alone[place] = True
            if alone.any():
                lists[f"without {name}"] = shelf.shortlists(~alone)
                lists[f"{name} alone"] = shelf.shortlists(alone)
        lists["by D0"] = shelf.d0.argsort(1)[:, :SHORTLIST].tolist()
        lists["by text"] = (-shelf.likeness).argsort(1)[:, :SHORTLIST].tolist()
        rng = random.Random(shelf.seed)
        everyone = range(len(shelf.donors))
        lists["by chance"] = [rng.sample(everyone, SHORTLIST) for _ in shelf.pairs]
        best = shelf.d1.argmin(1)
        for name, some in lists.items():
            found = [float(b in s) for b, s in zip(best, some, strict=True)]
            over = [np.log10(d[s].min() / d.min()) for d, s in zip(shelf.d1, some, strict=True)]
            self.recall.setdefault(name, []).extend(found)
            self.excess.setdefault(name, []).extend(map(float, over))

    def _judge(self, shelf: Shelf, done: dict[tuple, list[float]]) -> None:
        seen: dict[tuple[int, int], float] = {}
        for variant in VARIANTS:
            if variant.part != "donor":
                continue
            first = variant == heads()["donor"]
            dbs = done[("shipped", COUNTS[-1]) if first else (variant, COUNTS[-1])]
            for row, donor in enumerate(CHOICES[variant.name](shelf)):
                seen[(row, int(donor))] = dbs[row]
        self.judged += [(shelf.d0[i], shelf.d1[i], db) for i, db in seen.items()]

    def summary(self) -> dict[str, Any]:
        near = np.array(self.nearness) <= np.median(self.nearness)
        return {
            "targets": len(near),
            "donors": self.donors,
            "rows": [self._row(v, near) for v in VARIANTS],
            "signature": [
                {
                    "shortlist": name,
                    "recall": round(float(np.mean(found)), 4),
                    "excess": round(float(np.mean(self.excess[name])), 4),
                }
                for name, found in self.recall.items()
            ],
            "decision": decision(*np.array(self.judged).T),
        }

    def _row(self, variant: Variant, near: np.ndarray) -> dict[str, Any]:
        head = heads()[variant.part]
        out: dict[str, Any] = {"part": variant.part, "variant": variant.name}
        for count in COUNTS:
            own = np.array(self.db[(variant.part, variant.name, count)])
            base = np.array(self.db[(head.part, head.name, count)])
            out[str(count)] = stats(own, base)
            if variant.part != GUIDANCE:  # its targets are others
                out[f"near {count}"] = stats(own[near], base[near])
        return out


def heads() -> dict[str, Variant]:
    """The first variant of each part: the shipped form."""
    out: dict[str, Variant] = {}
    for variant in VARIANTS:
        out.setdefault(variant.part, variant)
    return out


def decibels(shelf: Shelf, variant: Variant, count: int, donors: np.ndarray) -> list[float]:
    """PSNR of each target's latent, at most 59 dB."""
    reference = shelf.scaled[1] if variant.part == GUIDANCE else shelf.reference
    latents = variant.run(shelf, count, donors)
    dbs = psnr_each(latents, reference, latent_peak(shelf.model))
    return [min(db, CAP_DB) for db in dbs]


def stats(own: np.ndarray, base: np.ndarray) -> dict[str, float | None]:
    """Mean and tenth percentile of dB, and the mean of paired differences with its error."""
    apart = own - base
    error = apart.std(ddof=1) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
    return {
        "mean_db": round(float(own.mean()), 3),
        "p10_db": low(own.tolist()),
        "delta_db": round(float(apart.mean()), 3),
        "delta_error_db": round(float(error), 3),
    }


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, equal values sharing the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[places]


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Correlation of ranks, or None where one of the two is constant."""
    x, y = ranks(a), ranks(b)
    if x.std() == 0 or y.std() == 0:
        return None
    return round(float(np.corrcoef(x, y)[0, 1]), 4)


def decision(d0: np.ndarray, d1: np.ndarray, db: np.ndarray) -> dict[str, Any]:
    """What deciding by each distance is worth, and by the PSNR itself, which nobody knows."""
    out: dict[str, Any] = {"runs": len(db), "fine": round(float((db >= FLOOR_DB).mean()), 4)}
    for name, order in (("D0", d0), ("D1", d1), ("the PSNR itself", -db)):
        nearest = order.argsort(kind="stable")
        below = {}
        for share in SHARES:
            accepted = db[nearest[: max(1, round(share * len(db)))]]
            below[f"{share:g}"] = round(float((accepted < FLOOR_DB).mean()), 4)
        out[name] = {"spearman": spearman(-order, db), "accepted_below_floor": below}
    return out


def text(name: str, summary: dict[str, Any]) -> str:
    """A backbone's summary for a terminal."""
    lines = [
        f"== {name}: {summary['targets']} targets, {summary['donors']} donors each",
        f"{'':<52}{'8 evaluations':^27}{'10 evaluations':^27}{'10, nearer half':^27}",
        f"{'':<52}" + 3 * f"{'mean':>6}{'p10':>6}{'against':>15}",
    ]
    for row in summary["rows"]:
        line = f"{row['part']}: {row['variant']}".ljust(52)
        for key in (*map(str, COUNTS), f"near {COUNTS[-1]}"):
            s = row.get(key)
            if s:
                apart = f"{s['delta_db']:+.2f} +-{s['delta_error_db']:.2f}"
                line += f"{s['mean_db']:>6.1f}{show(s['p10_db']):>6}{apart:>15}"
        lines.append(line)
    lines.append(f"{'least D1 among the four shortlisted':<52}{'recall':>8}{'excess':>8}")
    for row in summary["signature"]:
        lines.append(f"{row['shortlist']:<52}{row['recall']:>8.2f}{row['excess']:>8.2f}")
    found = summary["decision"]
    shares = "".join(f"{f'{s:.0%} accepted':>14}" for s in SHARES)
    title = f"decision over {found['runs']} runs"
    lines.append(f"{title:<40}{'rank corr.':>12}{shares}   (share below {FLOOR_DB:g} dB)")
    for by in ("D0", "D1", "the PSNR itself"):
        below = "".join(f"{b:>14.3f}" for b in found[by]["accepted_below_floor"].values())
        lines.append(f"{by:<40}{show(found[by]['spearman'], '.3f'):>12}{below}")
    return "\n".join(lines)


def run(model: EmbeddedModel, shelves: int, on_shelf: int, size: int = DONORS) -> Results:
    """Measure a model on so many shelves of targets."""
    pairs, results = targets(shelves * on_shelf), Results()
    total = len(pairs) * len(VARIANTS) * len(COUNTS)
    with tqdm(total=total, desc=model.family.title, unit="run") as bar:
        for start in range(0, len(pairs), on_shelf):
            some = pairs[start : start + on_shelf]
            bar.set_postfix_str("dense runs")
            shelf = Shelf(model, some, size, some[0].seed)
            bar.set_postfix_str("variants")
            results.add(shelf, bar)
    return results


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--shelves", type=int, help="groups of targets and donors")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_flush_denormal(True)
    shelves = chosen.shelves or (1 if chosen.quick else SHELVES)
    on_shelf = QUICK_ON_SHELF if chosen.quick else ON_SHELF
    try:
        found = models(chosen.backbone, chosen.model)
        targets(shelves * on_shelf)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    data: dict[str, Any] = {"command": command("ablation"), "summary": {}}
    for model in found:
        name = model.family.name
        summary = run(model, shelves, on_shelf).summary()
        data["summary"][name] = {"fingerprint": model.fingerprint, **summary}
        print(text(name, data["summary"][name]))
        if chosen.json:
            save(chosen.json, data)
    if chosen.plot:
        from .bars import ablation_plot

        ablation_plot(data["summary"], chosen.plot)


if __name__ == "__main__":
    main()
