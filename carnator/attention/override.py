"""The host's attention override: sparse where a plan says so, the given function otherwise.

Semantics are those of ComfyUI's ``optimized_attention_override``: it is called with the attention
function that would have run and that function's arguments. Nothing of the host is imported here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import hostcall, sparse_attention
from .blocks import KeyLists
from .choose import Trials, ranked
from .hostcall import Call
from .parts import Unavailable

log = logging.getLogger("carnator")
TRIALS = Trials()


@dataclass(frozen=True, eq=False)
class Connections:
    """What one attention call may look at: key lists, and the token at each of their places
    (int64 [N], None as they lie)."""

    lists: KeyLists
    order: Tensor | None = None


Answer = Connections | None
Plan = Callable[[Call], Answer | Sequence[Answer]]


def override(
    func: Callable[..., Tensor], *args: Any, plan: Plan, backend: str = "auto", **kwargs: Any
) -> Tensor:
    """Attention of one call of the host: ``func(*args, **kwargs)`` itself unless the plan has
    connections for it. Errors of plan and back ends are raised."""
    out = _sparse(func, args, kwargs, plan, backend, Counter())
    return func(*args, **kwargs) if out is None else out


class SparseAttention:
    """An attention override for a run.

    Args:
        plan: told of every call that sparse attention could stand in for; answers with the
            connections for all rows of the batch, with one answer per row, or with None: nothing
            to do.
        previous: an override that was there before; it is called wherever the given function
            would be.
        backend: as for ``sparse_attention``. With "auto", what is not expected to pay is left
            to the host.

    ``used`` counts the calls by back end, "host" for those that were passed on. After an error
    in a plan or a back end all further calls are passed on, and the log says so once.
    """

    def __init__(self, plan: Plan, previous: Any = None, backend: str = "auto"):
        self.plan, self.previous, self.backend = plan, previous, backend
        self.used: MutableMapping[str, int] = Counter()
        self.failed = False
        # The host hands over whole containers of tensors to overrides with this attribute only.
        if hasattr(previous, "container_function"):
            self.container_function = self._containers

    @torch.compiler.disable
    def __call__(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        host = func if self.previous is None else partial(self.previous, func)
        out = self._attempt(host, args, kwargs)
        if out is not None:
            return out
        _count(self.used, "host")
        return host(*args, **kwargs)

    @torch.compiler.disable
    def _containers(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same with q, k, v in containers, which give up their tensors once: they are only
        looked into until sparse attention has worked."""
        tensors = tuple(container.peek() for container in args[:3])
        out = self._attempt(None, (*tensors, *args[3:]), kwargs)
        del tensors
        if out is None:
            _count(self.used, "host")
            return self.previous.container_function(*args, **kwargs)
        for container in args[:3]:
            container.take()
        return out

    def _attempt(
        self,
        host: Callable[..., Tensor] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Tensor | None:
        if self.failed:
            return None
        try:
            return _sparse(host, args, kwargs, self.plan, self.backend, self.used)
        except Exception as error:  # out of memory too: the host's own may need less
            self.failed = True
            log.warning("[Carnator] attention stays dense from here on: %s", error)
            return None


def _sparse(
    host: Callable[..., Tensor] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    plan: Plan,
    backend: str,
    used: MutableMapping[str, int],
) -> Tensor | None:
    """The result in the host's shape, or None when the whole call is the host's. ``host`` is None
    when parts of the call cannot be given to it."""
    given = hostcall.arguments(args, kwargs)
    call = None if given is None else hostcall.read(given)
    if given is None or call is None:
        return None
    answer = plan(call)
    if answer is None:
        return None
    batch = len(call.q)
    rows: list[Answer] = [answer] * batch if isinstance(answer, Connections) else list(answer)
    if len(rows) != batch:
        raise ValueError(f"The plan has {len(rows)} answers for a batch of {batch}.")
    parts: list[Tensor] = []
    for start, stop in _equal_runs(rows):
        row, whole = rows[start], stop - start == batch
        dense = None
        if host is not None:
            dense = partial(host, **(given if whole else hostcall.rows_of(given, start, stop)))
        made = None if row is None else _one(call.rows(start, stop), row, dense, backend, used)
        if made is None:
            if whole or dense is None:
                return None
            made = dense()
            _count(used, "host")
        parts.append(made)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _one(
    call: Call,
    row: Connections,
    dense: Callable[[], Tensor] | None,
    backend: str,
    used: MutableMapping[str, int],
) -> Tensor | None:
    """The attention of rows with the same connections, or None where the host's is better."""
    auto = backend == "auto"
    for name in ranked(call.q, call.k, call.v, row.lists) if auto else [backend]:
        if name == "fused" and call.exact:
            continue

        def sparse(name: str = name) -> Tensor:
            return call.shaped(
                sparse_attention(
                    call.q, call.k, call.v, row.lists,
                    backend=name, scale=call.scale, order=row.order,
                )
            )  # fmt: skip

        try:
            # Where costs are guesses, and the host's attention is its own, the first call tells.
            if auto and call.q.device.type != "cpu" and dense is not None:
                key = TRIALS.key(call.q, row.lists, name)
                pays = TRIALS.verdict(key)
                if pays is None:
                    return TRIALS.run(key, call.q.device, dense, sparse)
                if not pays:
                    continue
            made = sparse()
        except Unavailable as error:
            log.info("[Carnator] %s attention is not used: %s", name, error)
            continue
        _count(used, name)
        return made
    return None


def _count(used: MutableMapping[str, int], name: str) -> None:
    used[name] = used.get(name, 0) + 1


def _equal_runs(rows: list[Answer]) -> list[tuple[int, int]]:
    """Stretches of the batch with the very same connections."""
    cuts = [0, *(i for i in range(1, len(rows)) if rows[i] is not rows[i - 1]), len(rows)]
    return list(zip(cuts, cuts[1:]))
