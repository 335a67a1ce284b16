"""How fast is the store, how big its records, and what does their coding cost?

``python -m benchmarks.store [--quick] [--json PATH] [--plot PATH]``

One record of a 30-step run of Wan 2.1 1.3B at 480p and 81 frames (latent 16x21x60x104), made of
the bundled model's real trajectories laid side by side to that size, is written and read next to
two references that keep the same tensors: a plain safetensors file, flushed to the device, and
diskcache as it comes, which pickles, and flushes nothing. The pickle is made and read in this
process alone, in a folder of its own that is deleted at the end.

Matching is measured in stores of small records of one partition: the whole of ``matching.match``
after a new record, as in a session, and the first one of a process. The references there look
at every signature anew.

The coding is measured by the PSNR of runs led by recorded donors against runs led by exact ones.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from carnator.demo import host
from carnator.demo.model import BUNDLED, EmbeddedModel

from .command import command, save
from .store_material import STEPS, WAN, big_record, coding_loss, coding_pairs
from .store_timing import matching, reading, writing

TARGETS = {
    "read_ms": 10.0,
    "match_ms_10k": 25.0,
    "write_ratio": 1.3,
    "record_mb": 70.0,
    "encoding_loss_db": 0.5,
}
COUNTS = (10, 100, 1000, 10_000)
EVALUATIONS = 8


def coding(model: EmbeddedModel, count: int) -> dict[str, Any]:
    """Decibels lost to the coding, at the donor's CFG and at a higher one."""
    pairs, found = coding_pairs(count), {}
    for name, cfg in (("same CFG", host.CFG), ("CFG + 1", host.CFG + 1)):
        lost = []
        for start in tqdm(range(0, len(pairs), 6), desc=f"coding, {name}", unit="batch"):
            lost += coding_loss(model, pairs[start : start + 6], EVALUATIONS, cfg)
        found[name] = {
            "mean_db": round(statistics.fmean(lost), 3),
            "worst_db": round(max(lost), 3),
            "pairs": len(lost),
        }
    return found


def measure(model: EmbeddedModel, quick: bool) -> dict[str, Any]:
    turns = 3 if quick else 7
    counts = tuple(n for n in COUNTS if n <= (1000 if quick else 10_000))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draft, spent = big_record(model, 4 if quick else 12)
        written, store = writing(draft, folder, turns)
        read = reading(draft, store, folder, turns)
        size = store.entries()[0].nbytes
        store.close()
        rows = matching(model, folder, counts, turns)
    loss = coding(model, 6 if quick else 24)
    changes = sum(t.dtype == torch.uint8 and n[:2] == "d." for n, t in draft.tensors.items())
    return {
        "summary": {
            "read_ms": read["ms_per_derivative"]["store"],
            "match_ms_10k": rows[-1]["match_ms"] if counts[-1] == 10_000 else None,
            "write_ratio": written["ratio"],
            "record_mb": round(size / 1e6, 1),
            "encoding_loss_db": max(row["mean_db"] for row in loss.values()),
        },
        "targets": TARGETS,
        "record": {
            "latent": list(WAN),
            "steps": STEPS,
            "guided": True,
            "in_4_bits": f"{changes} of {STEPS - 1} derivatives",
            **spent,
        },
        "writing": written,
        "reading": read,
        "matching": rows,
        "coding": loss,
    }


def table(data: dict[str, Any]) -> str:
    lines = ["                     measured   target"]
    for name, value in data["summary"].items():
        shown = "-" if value is None else f"{value:g}"
        lines.append(f"{name:20} {shown:>8}   {TARGETS[name]:g}")
    lines.append(f"\nWriting, ms per record: {data['writing']['ms']}")
    lines.append(f"Reading, ms per derivative: {data['reading']['ms_per_derivative']}")
    lines.append("\n" + "  ".join(f"{name:>15}" for name in data["matching"][0]))
    for row in data["matching"]:
        lines.append("  ".join(f"{row.get(name, '-'):>15}" for name in data["matching"][0]))
    lines.append(f"\nCoding: {data['coding']}")
    return "\n".join(lines)


def plot(data: dict[str, Any], path: Path) -> None:
    """Matching over the number of records, and the three ways of writing and reading."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = data["matching"]
    for key, label, style in (
        ("match_ms", "after a new record", "o-"),
        ("first_match_ms", "first of a process", "s--"),
        ("safetensors_ms", "plain safetensors files", "^:"),
        ("diskcache_pickle_ms", "diskcache (pickle)", "v:"),
    ):
        points = [(row["records"], row[key]) for row in rows if key in row]
        left.loglog(*zip(*points, strict=True), style, label=label)
    left.axhline(TARGETS["match_ms_10k"], color="#cccccc", zorder=0)
    left.set(title="A match", xlabel="records", ylabel="ms")
    left.legend(frameon=False, fontsize=8)
    times = data["writing"]["ms"]
    right.bar(range(len(times)), list(times.values()), color=["#d8702a", "#4878a8", "#9a9a9a"])
    right.set_xticks(range(len(times)), list(times), fontsize=8)
    right.set(title=f"Writing {data['summary']['record_mb']} MB", ylabel="ms")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer records and repeats")
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    data = {
        "command": command("store"),
        **measure(EmbeddedModel.load(options.model), options.quick),
    }
    print(table(data))
    if options.json:
        save(options.json, data)
    if options.plot:
        plot(data, options.plot)


if __name__ == "__main__":
    main()
