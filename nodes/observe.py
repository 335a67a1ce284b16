"""Watching one evaluation of the host from outside: guidance branches and self-attention.

Nothing here changes a number: the options are shallow copies for one call, the post-CFG function
returns what it was given, and the attention override calls what would have been called anyway.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("carnator")
OVERRIDE = "optimized_attention_override"
COND = 0  # the host's number of the positive branch in ``cond_or_uncond``
SAME = 1e-4  # relative; guidance recomputed from its branches is equal but for rounding


def call_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor, dict, tuple[Any, ...]]:
    """x, sigma [B], model options and the rest of a ``PREDICT_NOISE`` call."""
    names = ("x", "timestep", "model_options", "seed")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given["x"], given["timestep"], given.get("model_options") or {}, (given.get("seed"),)


class Watch:
    """Observes one evaluation at latents x [B, C, ...].

    ``cfg`` is the run's guidance scale, None when the guider joins its branches in its own way.
    ``attention`` takes each self-attention output [B, N, C] of the positive branch. ``sparse``
    makes an attention override of its own around the one that is there, or none.
    """

    def __init__(
        self,
        cfg: float | None,
        attention: Callable[[Tensor], None] | None,
        x: Tensor,
        sparse: Callable[[Any], Any] | None = None,
    ):
        self.cfg = cfg
        self.attention, self.sparse = attention, sparse
        self.tokens = x.shape[2:].numel() // 4  # at patches of 2 x 2, the largest in use
        self.began = time.perf_counter()
        self._seen: list[Mapping[str, Any]] = []

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def options(self, options: dict) -> dict:
        """The model options of this one call, with the observers in place."""
        own = dict(options)
        # First in line, so that it sees the plain guidance before other functions change it.
        own["sampler_post_cfg_function"] = [
            self._post_cfg,
            *options.get("sampler_post_cfg_function", ()),
        ]
        inner = options.get("transformer_options", {})
        previous = inner.get(OVERRIDE)
        # An override that takes whole containers of tensors has a path of its own: leave it.
        if self.attention is not None and not hasattr(previous, "container_function"):
            override = AttentionWatch(previous, self.attention, self.tokens)
            inner = {**inner, OVERRIDE: override}
        made = None if self.sparse is None else self.sparse(inner.get(OVERRIDE))
        if made is not None:
            inner = {**inner, OVERRIDE: made}
        own["transformer_options"] = inner
        return own

    def _post_cfg(self, args: Mapping[str, Any]) -> Tensor:
        self._seen.append(args)
        return args["denoised"]

    def branches(self, denoised: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Denoised of the positive and the negative branch (None at CFG 1), or (None, None) when
        they do not explain the result: guidance of another kind, or functions after it."""
        try:
            return self._branches(denoised)
        except Exception as error:  # out of memory too: the evaluation itself is good
            log.info("[Carnator] guidance is not observed (%s)", error)
            return None, None

    def _branches(self, denoised: Tensor) -> tuple[Tensor | None, Tensor | None]:
        seen, self._seen = self._seen, []
        if self.cfg is None or len(seen) != 1 or seen[0].get("cond_scale") != self.cfg:
            return None, None
        cond, uncond = seen[0]["cond_denoised"], seen[0]["uncond_denoised"]
        if seen[0]["uncond"] is None:
            uncond, joined = None, cond
        else:
            joined = uncond + (cond - uncond) * self.cfg
        if joined.shape != denoised.shape:
            return None, None
        apart = (joined - denoised).abs().max() > SAME * denoised.abs().max()
        return (None, None) if bool(apart) else (cond, uncond)


class AttentionWatch:
    """An attention override that calls on and shows self-attention over the latent's tokens."""

    def __init__(self, previous: Any, see: Callable[[Tensor], None], tokens: int):
        self.previous, self.see, self.tokens = previous, see, tokens
        self.failed = False

    def __call__(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if self.previous is not None:
            out = self.previous(function, *args, **kwargs)
        else:
            out = function(*args, **kwargs)
        if not self.failed:
            try:
                self._show(out, args, kwargs)
            except Exception as error:
                self.failed = True
                log.info("[Carnator] attention is not observed (%s)", error)
        return out

    def _show(self, out: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        q, k = args[0], args[1]
        axis = 2 if kwargs.get("skip_reshape") else 1
        if q.shape[axis] != k.shape[axis] or q.shape[axis] < self.tokens:
            return  # cross-attention, or text alone
        if kwargs.get("skip_output_reshape"):
            out = out.transpose(1, 2).flatten(2)
        order = kwargs.get("transformer_options", {}).get("cond_or_uncond", [COND])
        if COND not in order:
            return  # a forward pass of the negative branch alone
        rows = out.chunk(len(order))
        self.see(torch.cat([part for part, kind in zip(rows, order, strict=True) if kind == COND]))
