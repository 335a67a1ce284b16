"""One attention call of the host, read from the arguments it is made with.

q, k, v come as [B, N, H D], or with ``skip_reshape`` as [B, H, N, D]; k and v may have fewer heads
when ``enable_gqa`` is set. The result is [B, N, H E], or with ``skip_output_reshape``
[B, H, N, E].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

POSITIONAL = (
    "q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape"
)  # fmt: skip
# A call that says more than this may mean something else by it and is left to the host.
UNDERSTOOD = {
    *POSITIONAL,
    "scale",
    "enable_gqa",
    "low_precision_attention",
    "transformer_options",
    "_inside_attn_wrapper",
}


@dataclass(frozen=True, eq=False)
class Call:
    """q [B, H, N, D], k [B, G, M, D], v [B, G, M, E] as views of what the host gave, and the
    host's options for this forward pass. ``exact``: the model asks for no quantised attention.
    ``outer``: the result stays [B, H, N, E]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    options: Mapping[str, Any]
    exact: bool
    outer: bool

    @property
    def to_itself(self) -> bool:
        """Whether there are as many keys as queries, as in self-attention."""
        return self.q.shape[2] == self.k.shape[2]

    def rows(self, start: int, stop: int) -> Call:
        """The same call for some rows of the batch."""
        part = slice(start, stop)
        return replace(self, q=self.q[part], k=self.k[part], v=self.v[part])

    def shaped(self, out: Tensor) -> Tensor:
        """A result [B, H, N, E] as the host wants it."""
        return out if self.outer else out.transpose(1, 2).flatten(2)


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """All arguments by name, or None when there are more than are known."""
    if len(args) > len(POSITIONAL):
        return None
    given = {**dict(zip(POSITIONAL, args)), **kwargs}
    return given if given.keys() <= UNDERSTOOD else None


def rows_of(given: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The arguments of the same call for some rows of the batch."""
    return {**given, **{name: given[name][start:stop] for name in "qkv"}}


def read(given: Mapping[str, Any]) -> Call | None:
    """The call, or None for one that sparse attention cannot stand in for: with a mask of its
    own, in training, or with shapes that do not fit together."""
    heads, tensors = given.get("heads"), [given.get(name) for name in "qkv"]
    if given.get("mask") is not None or not isinstance(heads, int) or heads < 1:
        return None
    if not all(isinstance(t, Tensor) and t.is_floating_point() for t in tensors):
        return None
    q, k, v = (t for t in tensors if t is not None)
    if len({(t.device, t.dtype) for t in (q, k, v)}) != 1:
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return None
    if not given.get("skip_reshape", False):
        if not (q.ndim == k.ndim == v.ndim == 3) or q.shape[2] % heads:
            return None
        split = [_heads_apart(t, heads, given, q.shape[2] // heads) for t in (q, k, v)]
        if any(t is None for t in split):
            return None
        q, k, v = (t for t in split if t is not None)
    if not (q.ndim == k.ndim == v.ndim == 4) or q.shape[1] != heads:
        return None
    grouped = k.shape[1] != heads
    fits = (
        q.shape[0] == k.shape[0]
        and k.shape[:3] == v.shape[:3]
        and q.shape[3] == k.shape[3]
        and heads % k.shape[1] == 0
        and (not grouped or bool(given.get("enable_gqa", False)))
    )
    if not fits or 0 in (*q.shape, *k.shape, *v.shape):
        return None
    return Call(
        q, k, v,
        scale=given.get("scale"),
        options=given.get("transformer_options") or {},
        exact=given.get("low_precision_attention", True) is False,
        outer=bool(given.get("skip_output_reshape", False)),
    )  # fmt: skip


def _heads_apart(t: Tensor, heads: int, given: Mapping[str, Any], width: int) -> Tensor | None:
    """[B, N, H D] to [B, H, N, D]; grouped keys and values have heads as wide as the queries'."""
    if given.get("enable_gqa", False):
        heads = t.shape[2] // width
    if heads < 1 or t.shape[2] % heads:
        return None
    return t.unflatten(2, (heads, -1)).transpose(1, 2)
