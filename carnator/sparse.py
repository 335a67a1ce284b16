"""Sparse attention of one run: observed where the run is recorded, reused where it is not.

A run that will be recorded stays dense, and its self-attention is observed at a few noise levels.
A run that is not recorded (a hit, or one that is refused and would not be kept anyway) may look
only at the blocks that an earlier run of the same backbone and size needed, from its third
evaluation on. Each mask is tried on the run's own queries and keys before it is used.

Hosts ask ``Connectivity.override`` before every evaluation for an attention override in the form
of ComfyUI's ``optimized_attention_override``; None means that there is nothing to do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .attention.choose import paying
from .attention.hostcall import Call
from .attention.override import Connections, SparseAttention
from .backbones import TokenLayout
from .connectivity import Layout, Recorder, Reuse, anchor_steps, layout, target_blocks
from .connectivity.reuse import LayerUse
from .samplers import contract
from .sparse_records import Found, find, fitting, joined
from .store import Draft

if TYPE_CHECKING:
    from .engine import Run

log = logging.getLogger("carnator")

FIRST = 2  # evaluations that are never sparse: a donor is confirmed at the second
WORTH_SEEING = 0.25  # density at which sparse attention must pay for a run to be observed
POSITIVE = 0  # the hosts' number of the positive branch
Backbone = Callable[[], TokenLayout | None]


@dataclass
class SparseReport:
    """What came of sparse attention in a run. ``reason`` says why nothing did, or no more;
    ``observed`` counts noise levels, ``evaluations`` those that were sparse. ``source`` is whose
    masks were tried, ``layers`` what each layer used; ``calls`` counts attention calls of all
    kinds by back end, ``host`` being the host's own."""

    reason: str = ""
    observed: int = 0
    evaluations: int = 0
    source: str = ""
    layers: list[LayerUse] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For a person."""
        reason = self.reason
        if self.source and not self.evaluations:
            reason = reason or f"no head can do with {self.source}"
        why = f" ({reason})" if reason else ""
        if self.observed:
            return [f"Sparse attention: observed at {self.observed} noise levels{why}"]
        if not self.evaluations:
            return [f"Sparse attention: not used{why}"]
        lines = [f"Sparse attention: {self.evaluations} evaluations by {self.source}{why}"]
        for number, use in enumerate(self.layers):
            heads = ", ".join(f"{n} {name}" for name, n in use.heads.items() if n)
            if use.least_recall is not None:
                heads += f"; density {use.density:.2f}, least recall {use.least_recall:.3f}"
            lines.append(f"  layer {number}: {heads or 'dense'}")
        return lines


class Connectivity:
    """The attention of the run it is made for, and a part of it: it reads the run's state. Faults
    never reach the run: attention is then dense from there on, and the log says so once."""

    def __init__(self, run: Run):
        self.run, self.report = run, SparseReport()
        settings, request = run.settings, run.request
        self._records = run._recorder is not None
        self._off = settings.sparse == "off" or run.store is None
        rule = contract(request.sampler, request.sampler_options)
        calls = [] if self._off else [s for s in rule.calls(request.sigmas) if s > 0]
        self._levels = flow_levels(calls)
        self._anchors = list(anchor_steps(self._levels))
        self._backbone: TokenLayout | None = None
        self._shape: tuple[int, ...] = ()
        self._recorder: Recorder | None = None
        self._found: Found | None = None
        self._reuse: Reuse | None = None
        self._scope: Tensor | None = None  # of the run, when it was last looked at
        # Of the evaluation that is made:
        self._attention: SparseAttention | None = None
        self._call, self._seen, self._sparse = 0, 0, False
        self._anchor: int | None = None  # that it is observed for
        if not self._off:
            run.report.sparse = self.report

    def override(
        self, backbone: Backbone, shape: Sequence[int], previous: Any = None
    ) -> SparseAttention | None:
        """The attention override for the evaluation about to be made of latents of a shape
        [B, C, F, H, W], or None. ``backbone`` is asked at most once; ``previous`` is the override
        that was there before."""
        if self._off:
            return None
        try:
            self._settle()
            if self._off or not self._begin(backbone, tuple(shape)):
                return None
            made = SparseAttention(self._answer, previous, self.run.settings.attention)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        made.used, self._attention = self.report.calls, made
        return made

    def joined(self, draft: Draft) -> Draft:
        """A record to come, with what was observed of its attention."""
        self._settle()
        if self._off or self._recorder is None or self.report.observed < len(self._anchors):
            return draft
        return joined(draft, self._recorder, [self._levels[i] for i in self._anchors])

    def _give_up(self, why: str) -> None:
        self._off, self._recorder, self._reuse, self._found = True, None, None, None
        self.report.reason, self.report.observed = why, 0
        log.info("[Carnator] attention stays dense: %s", why)

    def _settle(self) -> None:
        """Close the evaluation before: its calls must have been whole passes of the model."""
        attention, self._attention = self._attention, None
        if attention is None or self._backbone is None or self._off:
            return
        layers = self._backbone.layers
        if attention.failed:
            self._give_up("an internal error, which the log tells")
        elif not self._seen or self._seen % layers:
            self._give_up(
                f"an evaluation made {self._seen} calls of self-attention, which are no passes of "
                f"{layers} layers"
            )
        elif self._anchor is not None:
            self.report.observed += 1

    def _begin(self, backbone: Backbone, shape: tuple[int, ...]) -> bool:
        """Whether this evaluation is observed, or may be sparse."""
        run, call = self.run, len(self.run.report.steps)
        self._call, self._seen, self._sparse, self._anchor = call, 0, False, None
        if run._recorder is not None:
            if call not in self._anchors:
                return False
            self._anchor = self._anchors.index(call)
        elif not FIRST <= call < len(self._levels) or run.match is None or not run.settings.reuse:
            return False
        elif self._records and not run.match.accepted:
            return False  # it was to be recorded, and turned out to be none that can be
        if self._backbone is None:
            self._backbone, self._shape = backbone(), shape
        if self._backbone is None or len(shape) != 5 or shape != self._shape:
            self._give_up("how this model lays out its tokens is not known")
            return False
        if self._anchor is None and self._found is None:
            self._found = find(run, shape)
            if not self._found:
                self._give_up("no earlier run of this model and size was observed")
        return not self._off

    def _answer(self, call: Call) -> Connections | None:
        """Observe one attention call of the host, or say what it may look at."""
        at = self._layout(call)
        if at is None or self._off or self._backbone is None:
            return None
        layer = self._seen % self._backbone.layers
        self._seen += 1
        if self._anchor is None:
            return self._reused(call, at, layer)
        self._observe(call, at, layer, self._anchor)
        return None

    def _layout(self, call: Call) -> Layout | None:
        """The layout of a call of self-attention over the video; None for any other call."""
        backbone = self._backbone
        if backbone is None or not call.to_itself:
            return None
        grid = backbone.grid(self._shape)
        text = call.q.shape[2] - math.prod(grid)
        if text < 0 or (text and backbone.text == "none"):
            return None
        first = backbone.text == "first"
        return layout(grid, text if first else 0, 0 if first else text)

    def _pays(self, call: Call, at: Layout, density: float) -> bool:
        named = self.run.settings.attention != "auto"
        return named or bool(paying(call.q, call.k, call.v, at.block, density))

    def _observe(self, call: Call, at: Layout, layer: int, anchor: int) -> None:
        kinds = call.options.get("cond_or_uncond") or [POSITIVE]
        if POSITIVE not in kinds or len(call.q) % len(kinds):
            return  # a pass of the negative branch alone
        heads = call.q.shape[1]
        if self._recorder is None:
            if not self._pays(call, at, WORTH_SEEING):
                self._give_up(f"at {at.tokens} tokens it would not pay here")
                return
            assert self._backbone is not None
            self._recorder = Recorder(at, self._backbone.layers, heads, len(self._anchors))
        if self._recorder.layout is not at or self._recorder.geometry.heads != heads:
            self._give_up("the number of tokens or heads changes within the run")
            return
        row = kinds.index(POSITIVE) * (len(call.q) // len(kinds))
        self._recorder.see(anchor, layer, call.q[row], call.k[row], call.scale)

    def _reused(self, call: Call, at: Layout, layer: int) -> Connections | None:
        if self._reuse is None:
            self._prepare(at, call.q.shape[1])
        reuse = self._reuse
        if reuse is None or reuse.layout is not at:
            return None
        scope = self.run._scope
        if layer == 0 and scope is not None and scope is not self._scope:
            self._scope = scope
            reuse.retarget(target_blocks(scope[None, None], at))
        level = self._levels[self._call]
        density = reuse.density(layer, level)
        if density == 1.0:
            return None
        if not self._pays(call, at, density):
            self.report.reason = f"at density {density:.2f} it would not pay here"
            return None
        found = reuse.connections(layer, level, call.q, call.k, call.scale)
        if found is not None and not self._sparse:
            self._sparse = True
            self.report.evaluations += 1
            self.run.report.sparsely()
        return found

    def _prepare(self, at: Layout, heads: int) -> None:
        """The masks found, for a layout that is known by now."""
        assert self._backbone is not None and self._found is not None
        layers = self._backbone.layers
        made = fitting(self._found, at, layers, heads)
        if made is None:
            self._give_up("the masks of earlier runs do not fit this one")
            return
        entry, donor, template = made
        most = self.run.settings.most_density
        self._reuse = Reuse(at, layers, heads, template, donor, most=most)
        self.report.source = f"the masks of {entry.meta.get('label') or entry.id}"
        self.report.layers = self._reuse.report


def flow_levels(sigmas: Sequence[float]) -> list[float]:
    """Noise levels from 0 to 1, as flow models have them; those of models whose sigma has no
    bound are s / (1 + s)."""
    bound = all(s <= 1.0 + 1e-3 for s in sigmas)
    return [s if bound else s / (1 + s) for s in sigmas]
