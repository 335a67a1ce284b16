"""How much faster is block-sparse attention than dense? ``python -m benchmarks.attention``

Dense attention and each back end run in turns on the same random tensors and masks; a figure is
the median over the turns of (dense seconds / back end's seconds) within one turn, so that load on
the machine, which slows both, does not decide. ``ratio_to_dense`` above 1 is faster than dense;
the most that skipping blocks can give is 1 / density. Masks are random, every block of queries
with another number of keys: neither lists of one length nor neighbouring blocks help.

``--memory`` measures peak memory instead, each back end in a process of its own. ``--sizes`` tells
the size of packed masks at real geometries (``mask_sizes.py``).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from carnator.attention import KeyLists, Unavailable, dense_attention, sparse_attention

TOKENS = (2048, 4096, 8192, 16384, 32768)
DENSITIES = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
QUICK_TOKENS, QUICK_DENSITIES = (2048, 8192), (0.15, 0.3, 0.5)
BACKENDS = ("gather", "flex", "fused", "auto")
HEADS, HEAD_DIM, BLOCK = 12, 128, 128
# Of a dense call, to keep a turn within seconds; where all heads would need more, fewer are
# measured, which a row says. Heads are computed one after the other, so the ratio stays.
WORK, QUICK_WORK = 7e11, 7e10
COLOURS = {"gather": "#d8702a", "flex": "#4878a8", "fused": "#7a9a4a", "auto": "#202020"}
Attention = Callable[[], Tensor]


def inputs(heads: int, tokens: int, dim: int, device: str) -> list[Tensor]:
    """Random q, k, v [1, H, N, D], lying in memory as a model's projections make them."""
    generator = torch.Generator().manual_seed(tokens)
    made = [torch.randn(1, tokens, heads, dim, generator=generator) for _ in range(3)]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [t.to(device, dtype).transpose(1, 2) for t in made]


def random_mask(heads: int, blocks: int, density: float) -> Tensor:
    """Bool [heads, blocks, blocks]; the diagonal is kept, the rest kept at random."""
    generator = torch.Generator().manual_seed(blocks)
    mask = torch.rand(heads, blocks, blocks, generator=generator)
    share = max(0.0, (density * blocks - 1) / max(1, blocks - 1))
    return (mask < share) | torch.eye(blocks, dtype=torch.bool)


def seconds(run: Attention, device: str) -> float:
    began = _clock(device)
    run()
    return _clock(device) - began


def _clock(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def heads_within(work: float, heads: int, tokens: int, dim: int) -> int:
    """How many heads a dense call may have to stay within ``work`` operations."""
    return max(1, min(heads, int(work / (4 * tokens**2 * dim))))


def measure(
    tokens: int, options: argparse.Namespace, device: str, bar: tqdm
) -> list[dict[str, Any]]:
    """Rows for one number of tokens."""
    work = QUICK_WORK if options.quick else WORK
    heads = heads_within(work, options.heads, tokens, options.head_dim)
    q, k, v = inputs(heads, tokens, options.head_dim, device)
    runs: dict[tuple[str, float], Attention] = {}
    dense = partial(dense_attention, q, k, v)
    dense()
    real = {}
    for density in options.densities:
        mask = random_mask(heads, -(-tokens // options.block), density)
        lists = KeyLists(mask, options.block)
        real[density] = lists.density
        for backend in options.backends:
            run = partial(sparse_attention, q, k, v, lists, backend=backend)
            try:
                run()  # compiles, starts threads
            except Unavailable as error:
                bar.write(f"{backend} is left out at {tokens} tokens: {error}")
            else:
                runs[backend, density] = run
            bar.update()
    ratios: dict[tuple[str, float], list[float]] = {key: [] for key in runs}
    for _ in range(options.turns):
        # Dense before and after every back end: what is compared is next to each other in time.
        last = seconds(dense, device)
        for key, run in runs.items():
            own = seconds(run, device)
            following = seconds(dense, device)
            ratios[key].append((last + following) / 2 / own)
            last = following
            bar.update()
    return [
        {
            "backend": backend,
            "tokens": tokens,
            "density": round(real[density], 4),
            "ratio_to_dense": round(statistics.median(values), 3),
            "share_of_ideal": round(statistics.median(values) * real[density], 3),
            "lowest": round(min(values), 3),
            "highest": round(max(values), 3),
            "heads": heads,
            "turns": len(values),
        }
        for (backend, density), values in ratios.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "backend   tokens  density  ratio to dense (lowest-highest)  share of 1/density  heads"
    ]
    for r in rows:
        spread = f"({r['lowest']:.2f}-{r['highest']:.2f})"
        lines.append(
            f"{r['backend']:<8}{r['tokens']:>8}{r['density']:>9.3f}{r['ratio_to_dense']:>12.2f} "
            f"{spread:<15}{r['share_of_ideal']:>20.2f}{r['heads']:>14}"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratio to dense over tokens, one panel per density, with the ideal as a line."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            "The plot needs matplotlib: install requirements-dev.txt, or leave --plot away."
        ) from error
    nominal = sorted({round(r["density"], 1 if r["density"] >= 0.18 else 2) for r in rows})
    figure = Figure(figsize=(2.2 * len(nominal) + 1, 3.4), layout="constrained")
    panels = figure.subplots(1, len(nominal), squeeze=False)[0]
    for panel, density in zip(panels, nominal, strict=True):
        near = [r for r in rows if abs(r["density"] - density) < 0.025]
        for backend in dict.fromkeys(r["backend"] for r in near):
            own = [(r["tokens"], r["ratio_to_dense"]) for r in near if r["backend"] == backend]
            panel.plot(
                *zip(*own, strict=True), marker="o", ms=3, label=backend, color=COLOURS[backend]
            )
        panel.axhline(1 / density, color="#bbbbbb", linewidth=1)
        panel.axhline(1, color="#bbbbbb", linewidth=1, linestyle=":")
        panel.set(title=f"density {density}", xscale="log", xlabel="tokens", ylim=(0, None))
    panels[0].set_ylabel("times as fast as dense (line: 1 / density)")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


# --- memory ------------------------------------------------------------------------------------


def peak_of(backend: str, tokens: int, density: float, options: argparse.Namespace) -> None:
    """Print the bytes that one call adds to what the process held before its tensors were made;
    run in a process of its own, since a peak cannot be reset."""
    heads, dim, block = options.heads, options.head_dim, options.block
    small = inputs(2, 4 * block, dim, "cpu")
    sparse_attention(*small, random_mask(2, 4, 0.5), block=block, backend="gather")
    lists = KeyLists(random_mask(heads, -(-tokens // block), density), block)
    before = _peak()
    q, k, v = (torch.randn(1, tokens, heads, dim).transpose(1, 2) for _ in range(3))
    # In the order of tiles, as in use; dense attention takes no notice of it.
    sparse_attention(q, k, v, lists, backend=backend, order=torch.randperm(tokens))
    print(_peak() - before)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    tokens = 8192 if options.quick else max(options.tokens)
    for density in options.densities:
        peaks = {}
        for backend in ("dense", "gather"):
            command = [sys.executable, "-m", "benchmarks.attention", "--peak", backend]
            command += ["--tokens", str(tokens), "--densities", str(density)]
            command += ["--heads", str(options.heads), "--head-dim", str(options.head_dim)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks[backend] = int(done.stdout.split()[-1])
        share = peaks["gather"] / peaks["dense"]
        rows.append({"tokens": tokens, "density": density, "heads": options.heads, **peaks,
                     "peak_over_dense": round(share, 4)})  # fmt: skip
        print(
            f"{tokens} tokens, density {density}: dense {peaks['dense'] / 2**20:.0f} MiB, gather "
            f"{peaks['gather'] / 2**20:.0f} MiB ({share - 1:+.1%})"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer tokens, densities and heads")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--densities", type=float, nargs="+")
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=["gather", "flex", "auto"]
    )
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM)
    parser.add_argument("--block", type=int, default=BLOCK)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--sizes", action="store_true", help="sizes of packed masks instead")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    options.tokens = options.tokens or (QUICK_TOKENS if options.quick else TOKENS)
    options.densities = options.densities or (QUICK_DENSITIES if options.quick else DENSITIES)
    torch.set_flush_denormal(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.inference_mode():
        if options.peak:
            peak_of(options.peak, options.tokens[0], options.densities[0], options)
            return
        if options.sizes:
            from .mask_sizes import sizes

            data = {"sizes": sizes(options.quick)}
        elif options.memory:
            data = {"memory": memory(options)}
        else:
            rows = []
            runs = len(options.backends) * len(options.densities)
            with tqdm(total=len(options.tokens) * runs * (1 + options.turns), unit="run") as bar:
                for tokens in options.tokens:
                    rows += measure(tokens, options, device, bar)
            print(table(rows))
            threads = torch.get_num_threads()
            data = {"device": device, "threads": threads, "head_dim": options.head_dim,
                    "block": options.block, "rows": rows}  # fmt: skip
            if options.plot:
                plot(rows, options.plot)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
