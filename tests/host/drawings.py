"""Draws what is drawn and not photographed: the icon, the banner, the workflows' thumbnails.

    python tests/host/drawings.py

The mark: two paths that leave one point of noise, an earlier generation's and a new one's; the
dots are the steps at which the model was evaluated.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
DOCS, WORKFLOWS = ROOT / "docs", ROOT / "workflows"
INK, PAPER, DONOR, OWN = "#e9edf2", "#15181d", "#56b56a", "#eaa93c"
FINE = 4  # drawn so many times larger, then made smaller
TITLES = {
    "carnator_demo": ("Demo", "tiny Wan, on a CPU, nothing to download"),
    "carnator_demo_hunyuan": ("Demo", "tiny HunyuanVideo, on a CPU, nothing to download"),
    "carnator_demo_ltx": ("Demo", "tiny LTX-Video, on a CPU, nothing to download"),
    "carnator_pipeline_demo": ("Pipeline demo", "probe, match, scope, sampler; on a CPU"),
    "carnator_wan21_t2v_1.3b": ("Wan 2.1 1.3B", "text to video"),
    "carnator_wan22_two_stages": ("Wan 2.2 14B", "text to video in two stages"),
    "carnator_hunyuan_video_t2v": ("HunyuanVideo", "text to video"),
    "carnator_ltx_video_t2v": ("LTX-Video", "text to video"),
}


class Sheet:
    """A picture of a size in pixels, drawn finely."""

    def __init__(self, width: int, height: int):
        self.size = width, height
        self.image = Image.new("RGB", (width * FINE, height * FINE), PAPER)
        self.pen = ImageDraw.Draw(self.image)

    def path(self, points: list[tuple[float, float]], color: str, width: float) -> None:
        for x, y in points:  # so many that no gap is left
            self.dot(x, y, width / 2, color)

    def dot(self, x: float, y: float, radius: float, color: str) -> None:
        box = [(v + s * radius) * FINE for s in (-1, 1) for v in (x, y)]
        self.pen.ellipse(box, fill=color)

    def text(self, x: float, y: float, words: str, size: float, color: str = INK) -> None:
        font = ImageFont.load_default(size * FINE)
        self.pen.text((x * FINE, y * FINE), words, fill=color, font=font, anchor="ls")

    def block(self, x: float, y: float, width: float, height: float, color: str) -> None:
        box = [v * FINE for v in (x, y, x + width, y + height)]
        self.pen.rounded_rectangle(box, radius=min(width, height) * FINE / 4, fill=color)

    def mark(self, x: float, y: float, side: float) -> None:
        """The mark in a square."""

        def at(t: float, bend: float) -> tuple[float, float]:
            own = t * t * (3 - 2 * t)
            return x + side * (0.1 + 0.8 * t), y + side * (0.5 - bend * own)

        for bend, color in ((0.3, DONOR), (-0.3, OWN)):
            points = [at(i / 600, bend) for i in range(601)]
            self.path(points, color, side * 0.055)
        for t in (0.36, 0.62, 1.0):
            self.dot(*at(t, -0.3), side * 0.062, OWN)
            self.dot(*at(t, -0.3), side * 0.03, PAPER)
        self.dot(*at(0, 0), side * 0.085, INK)

    def plan(self, x: float, y: float, width: float, height: float, count: int = 30) -> None:
        """The steps of a run that was a hit: evaluated and predicted."""
        evaluated = {0, 1, *(round(1 + (count - 2) * i / 6) for i in range(1, 7)), count - 1}
        step = width / count
        for i in range(count):
            color = OWN if i in evaluated else "#33573b"
            self.block(x + i * step, y, step * 0.84, height, color)

    def save(self, path: Path, **options: object) -> None:
        self.image.resize(self.size, Image.Resampling.LANCZOS).save(path, **options)


def icon() -> None:
    sheet = Sheet(400, 400)
    sheet.mark(20, 20, 360)
    sheet.save(DOCS / "icon.png", optimize=True)


def banner() -> None:
    sheet = Sheet(1050, 450)
    sheet.mark(30, 45, 360)
    sheet.text(430, 225, "Carnator", 96)
    sheet.text(434, 275, "The next generation starts from the last one.", 26, "#aab2bd")
    sheet.plan(434, 315, 560, 16)
    sheet.save(DOCS / "banner.png", optimize=True)


def thumbnail(name: str) -> None:
    title, below = TITLES[name]
    sheet = Sheet(480, 300)
    sheet.mark(20, 20, 150)
    sheet.text(30, 212, title, 34)
    sheet.text(31, 240, below, 16, "#aab2bd")
    sheet.plan(30, 262, 420, 12)
    for i, shift in enumerate((0.0, 0.34, 0.67, 1.0)):  # four frames of what is being made
        x, y, side = 206 + i * 64, 62, 56
        sheet.block(x, y, side, side, "#2a2f37")
        sheet.dot(x + side * (0.3 + 0.35 * shift), y + side * 0.42, side * 0.17, DONOR)
        turn = math.pi * shift / 3
        sheet.dot(
            x + side * (0.5 + 0.22 * math.cos(turn)),
            y + side * (0.55 + 0.22 * math.sin(turn)),
            side * 0.12,
            OWN,
        )
    sheet.save(WORKFLOWS / f"{name}.jpg", quality=88, optimize=True)


def main() -> None:
    icon()
    banner()
    for path in sorted(WORKFLOWS.glob("*.json")):
        json.loads(path.read_text())
        thumbnail(path.stem)


if __name__ == "__main__":
    main()
