"""Token layouts against the host's own models: what its attention calls look like."""

from __future__ import annotations

import importlib
import math
from typing import Any

import comfy.ops
import pytest
import torch
from harness import part
from layout_cases import CASES, TEXT, Case
from torch import Tensor

backbones = part("carnator.backbones")
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def build(case: Case, sizes: dict[str, Any], device: str) -> torch.nn.Module:
    try:
        module = importlib.import_module(f"comfy.ldm.{case.module}")
    except ImportError:
        pytest.skip(f"this ComfyUI has no {case.module}")
    made = getattr(module, case.cls)(
        **sizes, dtype=torch.float32, device=device, operations=comfy.ops.disable_weight_init
    )
    return made.requires_grad_(False).eval()


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@every_case
def test_the_published_size_is_read_off_the_shapes(case):
    found = backbones.layout_of(shapes(build(case, case.real, "meta")))
    assert found is not None
    usual = {"head_dim": 128, "patch": (1, 2, 2)}
    for name, value in {**usual, **case.layout}.items():
        assert getattr(found, name) == value, name


class Seen:
    """An attention override that keeps every call's queries, keys and arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, int, bool]] = []

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Tensor:
        heads = args[3] if len(args) > 3 else kwargs["heads"]
        split = bool(kwargs.get("skip_reshape"))
        self.calls.append((args[0].clone(), args[1].clone(), heads, split))
        return function(*args, **kwargs)


def watch(model: torch.nn.Module, case: Case, latent: Tensor, text: Tensor) -> list:
    seen = Seen()
    torch.manual_seed(1)  # for the other inputs
    with torch.no_grad():
        model(
            latent,
            torch.tensor([500.0]),
            context=text,
            **case.inputs(),
            transformer_options={"optimized_attention_override": seen},
        )
    return seen.calls


@every_case
def test_the_calls_of_a_forward_pass_are_those_of_the_layout(case):
    """One patch of the latent is changed: of the sequence that first self-attention sees, that
    patch's token must change and no other."""
    model = build(case, case.small, "cpu")
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.normal_(0, 0.05, generator=generator)
    layout = backbones.layout_of(shapes(model), case.heads)
    text = torch.randn(1, TEXT, case.context, generator=generator)
    latent = torch.randn(case.latent, generator=generator)
    place = (1, 2, 1) if layout.patch[0] == 1 else (1, 1, 2)  # frame, row, column of a token
    other = latent.clone()
    t, h, w = (slice(i * p, i * p + p) for i, p in zip(place, layout.patch, strict=True))
    other[:, :, t, h, w] += 1
    calls, changed = watch(model, case, latent, text), watch(model, case, other, text)

    assert len(calls) == layout.before + layout.calls * layout.layers
    grid = layout.grid(case.latent)
    layers = []
    for number, (q, k, heads, split) in enumerate(calls):
        axis = 2 if split else 1
        assert (heads, split) == (layout.heads, layout.split_heads)
        assert q.shape[-1] * (heads if split else 1) == layout.heads * layout.head_dim
        layer = layout.layer_of(number)
        video = layout.video_tokens(q.shape[axis], case.latent)
        if layer is None:  # text alone, or cross-attention
            assert video is None or q.shape[axis] != k.shape[axis]
            continue
        layers.append(layer)
        assert q.shape == k.shape and video is not None
        assert video.stop - video.start == math.prod(grid)
        assert (q.shape[axis] > math.prod(grid)) == (layout.text != "none")
        if layer == 0:
            moved = (q != changed[number][0]).transpose(0, axis).flatten(1).any(1)
            index = (place[0] * grid[1] + place[1]) * grid[2] + place[2]
            assert moved.nonzero().flatten().tolist() == [video.start + index]
    assert layers == list(range(layout.layers))


def test_the_host_has_all_families():
    """What may be missing is known, so that a renamed module does not pass for an old host."""
    missing = set()
    for case in CASES.values():
        try:
            importlib.import_module(f"comfy.ldm.{case.module}")
        except ImportError:
            missing.add(case.module)
    assert missing <= {"cogvideo.model"}  # younger than the oldest host
