"""Pictures of a session: a contact sheet, and an animation of dense runs next to Carnator's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from .session import Outcome

ZOOM = 3
GAP = 4
LABEL_WIDTH = 316
LINE = 18
PAPER, INK, FAINT = (250, 250, 248), (30, 30, 34), (110, 110, 118)
EDGE = (205, 205, 205)
# Reuse scope: from "computes for itself" (weight 0) to "trusts the donor" (weight 1).
COOL, WARM = np.array([38.0, 70.0, 130.0]), np.array([250.0, 200.0, 90.0])
FRAME_MS = 220
ANIMATED_ROWS = 6


def font(size: int = 14) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def frames_of(clip: Tensor, zoom: int = ZOOM) -> list[Image.Image]:
    """The frames of a clip [3, F, H, W] in [-1, 1], enlarged without smoothing."""
    pixels = ((clip.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
    return [_enlarged(p, p.shape[1] * zoom, p.shape[0] * zoom) for p in pixels]


def scope_frames(
    scope: np.ndarray | None, width: int, height: int, count: int
) -> list[Image.Image]:
    """The reuse scope [F, h, w] in 0..1 as ``count`` pictures; empty paper where there is none."""
    if scope is None:
        return [Image.new("RGB", (width, height), PAPER)] * count
    weight = np.clip(np.asarray(scope, dtype=np.float64), 0, 1)[..., None]
    pixels = (COOL + weight * (WARM - COOL)).round().astype(np.uint8)
    pick = [i * len(pixels) // count for i in range(count)]
    return [_enlarged(pixels[i], width, height) for i in pick]


def _enlarged(pixels: np.ndarray, width: int, height: int) -> Image.Image:
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)


def contact_sheet(outcomes: Sequence[Outcome]) -> Image.Image:
    """One row per request: what it was, the dense run, Carnator's run, the reuse scope."""
    first = frames_of(outcomes[0].dense.clip)
    width, height = first[0].size
    strip = len(first) * (width + GAP)
    row = height + 3 * GAP
    columns = [LABEL_WIDTH + i * (strip + 4 * GAP) for i in range(3)]
    top = 2 * LINE + GAP
    size = (columns[2] + strip + GAP, top + row * len(outcomes) + LINE + 2 * GAP)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    titles = ("dense run", "Carnator", "reuse scope")
    for x, title in zip(columns, titles, strict=True):
        draw.text((x, GAP), title, INK, font(16))
    for number, outcome in enumerate(outcomes):
        y = top + number * row
        for i, (text, color) in enumerate(_label(outcome)):
            draw.text((2 * GAP, y + i * LINE), text, color, font(12 if color is FAINT else 14))
        strips = (
            frames_of(outcome.dense.clip),
            frames_of(outcome.result.clip),
            scope_frames(outcome.report.scope, width, height, len(first)),
        )
        for x, pictures in zip(columns, strips, strict=True):
            for i, picture in enumerate(pictures):
                sheet.paste(picture, (x + i * (width + GAP), y))
                if x < columns[2]:
                    _frame(draw, x + i * (width + GAP), y, width, height)
    _legend(draw, columns[2], size[1] - LINE - GAP)
    return sheet


def _frame(draw: ImageDraw.ImageDraw, x: int, y: int, width: int, height: int) -> None:
    """A hairline, since a white clip has no edge on paper."""
    draw.rectangle((x, y, x + width - 1, y + height - 1), outline=EDGE)


def _label(outcome: Outcome) -> list[tuple[str, tuple[int, int, int]]]:
    report = outcome.report
    evaluations = f"{report.evaluations} of {report.dense_evaluations} evaluations"
    lines = [(outcome.wish.name, INK), (f"{outcome.decision}: {evaluations}", INK)]
    if report.evaluations < report.dense_evaluations:
        speed = outcome.dense_seconds / outcome.seconds
        lines.append((f"{speed:.1f}x faster, {outcome.psnr_db:.1f} dB", INK))
    return [*lines, (_shortened(outcome.wish.prompt, 52), FAINT)]


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _legend(draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
    for color, text in ((WARM, "the donor is trusted"), (COOL, "computes for itself")):
        draw.rectangle((x, y + 2, x + 12, y + 14), fill=tuple(int(c) for c in color))
        draw.text((x + 18, y), text, FAINT, font(13))
        x += 180


def animation(outcomes: Sequence[Outcome]) -> list[Image.Image]:
    """The frames of a small film: dense runs in the upper row, Carnator's below them."""
    shown = [o for o in outcomes if o.report.evaluations < o.report.dense_evaluations]
    shown = (shown or list(outcomes))[:ANIMATED_ROWS]
    pairs = [(frames_of(o.dense.clip), frames_of(o.result.clip)) for o in shown]
    width, height = pairs[0][0][0].size
    size = (len(pairs) * (width + GAP) + GAP, 2 * (height + LINE + GAP) + GAP)
    film = []
    for moment in range(len(pairs[0][0])):
        page = Image.new("RGB", size, PAPER)
        draw = ImageDraw.Draw(page)
        for i, (outcome, rows) in enumerate(zip(shown, pairs, strict=True)):
            report = outcome.report
            calls = (report.dense_evaluations, report.evaluations)
            for j, (name, frames) in enumerate(zip(("dense", "Carnator"), rows, strict=True)):
                x, y = GAP + i * (width + GAP), GAP + j * (height + LINE + GAP)
                draw.text((x, y), f"{name}: {calls[j]}", INK, font(13))
                page.paste(frames[moment], (x, y + LINE))
        film.append(page)
    return film


def write_sheet(outcomes: Sequence[Outcome], path: Path) -> None:
    contact_sheet(outcomes).save(path, optimize=True)


def write_animation(outcomes: Sequence[Outcome], path: Path) -> None:
    """A looping GIF or WebP, as the path's suffix says."""
    first, *rest = animation(outcomes)
    first.save(path, save_all=True, append_images=rest, duration=FRAME_MS, loop=0)
