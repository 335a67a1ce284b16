"""The loss of a training run as a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 36, 40  # margins around the axes
PAPER, INK, FAINT, LINE = (250, 250, 248), (30, 30, 34), (215, 215, 213), (216, 112, 42)
DOT = (244, 214, 190)
SMOOTHING = 0.8  # of the exponential (geometric) mean drawn over the single losses


def read_losses(path: Path) -> dict[int, float]:
    """Loss by step from a training log; where a step was run again, the last one counts."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    losses = {row["step"]: row["loss"] for row in rows}
    return dict(sorted(losses.items()))


def write_curve(log: Path, out: Path, title: str) -> None:
    """Draw the losses of a log over the steps, on a logarithmic scale, and their running mean."""
    losses = {step: loss for step, loss in read_losses(log).items() if loss > 0}
    if not losses:
        return
    page = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(13)
    last = max(*losses, 1)
    low = math.floor(math.log10(min(losses.values())) * 5) / 5
    high = max(math.ceil(math.log10(max(losses.values())) * 5) / 5, low + 0.2)

    def place(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + step / last * (WIDTH - LEFT - RIGHT)
        y = TOP + (high - math.log10(loss)) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return x, y

    for i in range(round((high - low) * 5) + 1):
        level = 10 ** (low + i / 5)
        _, y = place(0, level)
        draw.line((LEFT, y, WIDTH - RIGHT, y), FAINT)
        draw.text((LEFT - 8, y), f"{level:.3g}", INK, font, anchor="rm")
    for i in range(5):
        x, _ = place(last * i / 4, 10**low)
        draw.text((x, HEIGHT - BOTTOM + 8), f"{last * i / 4:.0f}", INK, font, anchor="ma")
    draw.text((LEFT, TOP - 12), f"{title}: training loss over steps", INK, font, anchor="ls")
    mean, line = next(iter(losses.values())), []
    for step, loss in losses.items():
        x, y = place(step, loss)
        draw.ellipse((x - 1.5, y - 1.5, x + 1.5, y + 1.5), fill=DOT)
        mean = mean**SMOOTHING * loss ** (1 - SMOOTHING)
        line.append(place(step, mean))
    if len(line) > 1:
        draw.line(line, LINE, 2)
    page.save(out, optimize=True)
