"""The derivatives along a path as bytes: 4-bit changes where it is smooth, int8 where it turns.

From one evaluation to the next a guided derivative changes by a few percent, and mostly in few
places. So 16 levels for the change, with a scale for every few neighbours, are as fine as 256 for
the whole. Changes are taken from what a reader will have decoded, not from what was meant: errors
do not add up.

Both forms are one flat tensor, scales first; their dtype tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 0.02  # relative RMS error up to which 4 bits will do; int8 alone has about 0.01
BLOCK = 32  # neighbours that share a scale
LEVELS = 7.5  # of 4 bits: -7.5, -6.5 ... 7.5 scales
HALF_TINY, HALF_MOST = 6e-8, 6.5e4  # what float16 can hold
MOST_SCALE = 1e6  # of what is read: beyond any latent, and nothing computed from it overflows


def encode_whole(d: Tensor) -> Tensor:
    """A derivative [1, C, ...] as int8 with one float32 scale per channel, symmetrically rounded.
    The relative RMS error is about 1 %."""
    flat = d.detach().float().flatten(2)[0]
    scales = flat.abs().amax(1).clamp_min_(1e-12).div_(127)
    values = torch.div(flat, scales[:, None]).round_().to(torch.int8)
    return torch.cat([scales.view(torch.int8), values.flatten()])


def encode_change(d: Tensor, before: Tensor) -> Tensor:
    """The change from ``before`` to d (both [1, C, ...]) as uint8: float16 scales per BLOCK
    elements, then two levels to a byte, those of the first half in the low nibbles."""
    change = torch.sub(d.detach(), before).float().flatten()
    if spare := -len(change) % BLOCK:
        change = torch.nn.functional.pad(change, (0, spare))
    change = change.view(-1, BLOCK)
    scales = (change.abs().amax(1) / LEVELS).clamp_(HALF_TINY, HALF_MOST).to(torch.float16)
    levels = torch.div(change, scales.float()[:, None]).add_(LEVELS + 0.5).clamp_(0, 15.5)
    low, high = levels.to(torch.uint8).flatten().chunk(2)
    return torch.cat([scales.view(torch.uint8), low | (high << 4)])


def encode_alone(d: Tensor) -> Tensor:
    """A derivative [1, C, ...] as its change from zero. The relative RMS error is about 8 %."""
    return encode_change(d, torch.zeros_like(d))


def decode(data: Tensor, shape: Sequence[int], before: Tensor | None = None) -> Tensor:
    """The derivative of ``shape`` [1, C, ...] in float32, from either form; a change needs the
    derivative ``before`` it."""
    scales, values = _parts(data, shape)
    if not is_change(data):
        return (values.view(len(scales), -1) * scales[:, None]).view(*shape)
    if before is None:
        raise ValueError("A change cannot be decoded without the derivative before it.")
    # Twice the level is odd and fits an int8: one pass less over floats.
    levels = torch.cat([values & 15, values >> 4]).view(torch.int8).mul_(2).sub_(15)
    flat = before.flatten()
    if spare := -len(flat) % BLOCK:
        flat = torch.nn.functional.pad(flat, (0, spare))
    blocks = (len(scales), BLOCK)
    after = torch.addcmul(
        flat.view(blocks), levels.view(blocks).float(), (scales.float() / 2)[:, None]
    )
    return after.flatten()[: before.numel()].view(before.shape)


def is_change(data: Tensor) -> bool:
    """Whether an encoded derivative can only be decoded after the one before it."""
    return data.dtype == torch.uint8


def fits(data: Tensor, shape: Sequence[int]) -> bool:
    """Whether untrusted data decodes to finite numbers of ``shape`` [1, C, ...]."""
    count, blocks = torch.Size(shape).numel(), -(-torch.Size(shape).numel() // BLOCK)
    lengths = {torch.int8: 4 * shape[1] + count, torch.uint8: blocks * (2 + BLOCK // 2)}
    if data.ndim != 1 or len(data) != lengths.get(data.dtype):
        return False
    # In float32, which can hold the bound; NaN is not below it.
    return bool((_parts(data, shape)[0].float().abs() <= MOST_SCALE).all())


def _parts(data: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Scales and values."""
    if is_change(data):
        size = len(data) // (2 + BLOCK // 2) * 2
        return data[:size].view(torch.float16), data[size:]
    return data[: 4 * shape[1]].view(torch.float32), data[4 * shape[1] :]


class Encoder:
    """Encodes the derivatives of a path in turn, each as coarsely as ``tolerance`` (relative RMS
    error) allows."""

    def __init__(self, start: Tensor, tolerance: float = TOLERANCE) -> None:
        """``start`` [1, C, ...]: the first derivative, which the reader has from elsewhere."""
        self.encoded: list[Tensor] = []
        self._last = start.detach().float()
        self._tolerance = tolerance

    def add(self, d: Tensor) -> Tensor:
        """The next derivative [1, C, ...], encoded."""
        data = encode_change(d, self._last)
        reached = decode(data, d.shape, self._last)
        error = torch.sub(reached, d).square_().mean()
        if not bool(error <= self._tolerance**2 * d.float().square().mean()):
            data = encode_whole(d)
            reached = decode(data, d.shape)
        self._last = reached
        self.encoded.append(data)
        return data


class Decoder:
    """Decodes any derivative of a path; those asked for in the order of the path cost least."""

    KEPT = 2  # the two that an answer between them takes

    def __init__(self, start: Tensor, encoded: Sequence[Tensor], chained: bool = True) -> None:
        """``start`` [1, C, ...] is number 0, ``encoded`` what an ``Encoder`` made of the rest; or
        what ``encode_alone`` made of each, then not ``chained``."""
        self.start, self.encoded, self.chained = start, list(encoded), chained
        self._decoded: dict[int, Tensor] = {}

    def __getitem__(self, i: int) -> Tensor:
        if i == 0:
            return self.start
        if not self.chained:
            return decode(self.encoded[i - 1], self.start.shape, torch.zeros_like(self.start))
        first = i  # to be decoded
        while first > 1 and first - 1 not in self._decoded and is_change(self.encoded[first - 1]):
            first -= 1
        for j in range(first, i + 1):
            if j not in self._decoded:
                before = self.start if j == 1 else self._decoded.get(j - 1)
                self._keep(j, decode(self.encoded[j - 1], self.start.shape, before))
        return self._decoded[i]

    def _keep(self, i: int, d: Tensor) -> None:
        while len(self._decoded) >= self.KEPT:
            del self._decoded[next(iter(self._decoded))]
        self._decoded[i] = d
