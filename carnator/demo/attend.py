"""The attention of the embedded backbones, where a host may look on or stand in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

Observe = Callable[..., object]


class Watched:
    """An observer of attention that may also compute it.

    ``observe`` is called with each self-attention's output [B, N, C]. ``override`` has the form
    of ComfyUI's ``optimized_attention_override``; ``options`` is what it finds as the host's
    options of this forward pass.
    """

    def __init__(
        self,
        observe: Callable[[Tensor], object] | None = None,
        override: Any = None,
        options: dict[str, Any] | None = None,
    ):
        self.observe, self.override, self.options = observe, override, options or {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention [B, H, N, D] of q, k, v [B, H, N, D]."""
        if self.override is None:
            return F.scaled_dot_product_attention(q, k, v)
        words = {"skip_reshape": True, "skip_output_reshape": True}
        return self.override(_dense, q, k, v, q.shape[1], transformer_options=self.options, **words)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if self.observe is not None:
            self.observe(out)


def _dense(q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
    del heads, args, kwargs
    return F.scaled_dot_product_attention(q, k, v)


def attended(q: Tensor, k: Tensor, v: Tensor, observe: Observe | None) -> Tensor:
    """Self-attention [B, N, H D] of q, k, v [B, H, N, D]. ``observe`` is called with them and the
    result; a ``Watched`` among its wrappings computes it."""
    watched = getattr(observe, "func", observe)
    if isinstance(watched, Watched):
        out = watched.attend(q, k, v)
    else:
        out = F.scaled_dot_product_attention(q, k, v)
    out = out.transpose(1, 2).flatten(2)
    if observe is not None:
        observe(q, k, v, out)
    return out
