"""One request from probe to record.

A host makes a ``Run`` when a sampler starts, asks it for ``denoised`` at every call of the
sampler, and tells it how the run ended. All state of a request lives in this object.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .derivative import denoised_from, derivative
from .matching import Match, blocked, confirm, match
from .plan import Plan
from .predict import Predictor, schedule_position
from .recording import Recorder, draft, load, name_of
from .report import Report, StepLog
from .request import Evaluation, Probe, Request, Settings
from .risk import Guard
from .samplers import as_expected, contract
from .signature import AttentionProbe, signature
from .sparse import Connectivity
from .store import RecordError, Store
from .trajectory import Trajectory, same_sigma

log = logging.getLogger("carnator")
T = TypeVar("T")


class Run:
    """The engine's side of one sampler run.

    Args:
        settings, request: what is wanted, and of what.
        store: where earlier generations are kept; None runs dense.
        probe: the first evaluation, when it was made before (the pipeline nodes).
        verdict: the match made of that probe; made here when None.

    Internal errors never reach the generation: they are logged once and the rest runs dense.
    """

    def __init__(
        self,
        settings: Settings,
        request: Request,
        store: Store | None,
        *,
        probe: Probe | None = None,
        verdict: Match | None = None,
    ):
        self.settings, self.request, self.store = settings, request, store
        self.report = Report(preset=settings.preset, budget_db=settings.budget)
        self.probe: Probe | None = None
        self.match: Match | None = verdict
        self._given = probe
        self._attention: AttentionProbe | None = AttentionProbe()
        self._predictor: Predictor | None = None
        self._guard: Guard | None = None
        self._donor: Trajectory | None = None
        self._final: Tensor | None = None
        self._plan: Plan | None = None
        self._scope: Tensor | None = None
        self._gap, self._evaluation_seconds, self._tightened = 0.0, 0.0, False
        self._calls, self._last_sigma, self._began = 0, float("inf"), time.perf_counter()
        self._shape: tuple[int, ...] = ()
        rule = contract(request.sampler, request.sampler_options)
        # Another kind of path begins with the same first evaluation: D0 could not tell it apart.
        donates = settings.record and store is not None and rule.kind != "refused"
        self._recorder = Recorder(request.cfg) if donates else None
        if rule.why:
            self.report.record = f"not recorded: {request.sampler!r} is no donor: {rule.why}"
        self._expected = rule.calls(request.sigmas) if len(request.sigmas) > 1 else []
        self.connectivity = Connectivity(self)

    # What the host calls.

    @property
    def wants_attention(self) -> bool:
        """True while the probe's evaluation runs: self-attention outputs are asked for."""
        return self._attention is not None and self.store is not None

    def attention(self, out: Tensor) -> None:
        """Observe one self-attention output [B, N, C] of the probe's evaluation."""
        if self._attention is not None:
            self._guarded(self._attention.see, out)

    def denoise(self, x: Tensor, sigma: float, evaluate: Callable[[], Evaluation]) -> Tensor:
        """``denoised`` at latents x [B, C, ...] and a sigma: evaluated or predicted.

        What ``evaluate`` returns is handed on untouched, and what it raises is not caught.
        """
        self._calls += 1
        call = self._calls - 1
        predicted = self._guarded(self._before, call, x, sigma)
        if predicted is not None:
            return predicted
        given = None if self._given is None else self._given.at(call)
        if given is not None and given.sigma == sigma and torch.equal(given.x, x):
            # A copy: the sampler may work in place, and a probe can be used again.
            evaluation = replace(given.evaluation, denoised=given.evaluation.denoised.clone())
            seconds = given.seconds
        else:
            began = time.perf_counter()
            evaluation = evaluate()
            seconds = time.perf_counter() - began
        self._evaluation_seconds += seconds
        self.report.evaluations += 1
        self._guarded(self._after, call, x, sigma, evaluation, seconds)
        return evaluation.denoised

    def finish(self, latent: Tensor) -> Tensor:
        """Close a run that ended well; returns the latent to hand out (on an exact hit the stored
        one, else ``latent`` itself) and sends a dense run to the store."""
        self._guarded(self._close)
        if self._final is not None and self._final.shape == latent.shape:
            latent = self._final.to(device=latent.device, dtype=latent.dtype)
        elif self._recorder is not None:
            self._guarded(self._submit, latent)
        self._guarded(lambda: log.info("[Carnator] %s", self.report.line()))
        return latent

    def abandon(self, reason: str) -> None:
        """Close a run that was cancelled or failed: nothing is recorded."""
        self._recorder = None
        self._guarded(self._close)
        self.report.record = f"not recorded: {reason}"

    # The parts.

    def _guarded(self, work: Callable[..., T], *args: Any) -> T | None:
        try:
            return work(*args)
        except Exception as error:
            log.warning(
                "[Carnator] internal error, the run goes on dense: %s: %s",
                type(error).__name__,
                error,
                exc_info=log.isEnabledFor(logging.DEBUG),
            )
            self._go_dense(f"internal error ({type(error).__name__}: {error})")
            self._recorder = self._attention = None
            return None

    def _go_dense(self, reason: str) -> None:
        """Evaluate everything from here on. What was predicted so far stays valid."""
        self._predictor = self._plan = self._donor = self._final = None
        self.report.note(f"From step {self._calls} on every step is evaluated: {reason}.")

    def _before(self, call: int, x: Tensor, sigma: float) -> Tensor | None:
        """The predicted denoised, or None when this call is to be evaluated."""
        rising = sigma > self._last_sigma and not same_sigma(sigma, self._last_sigma)
        self._last_sigma = sigma
        astray = call >= len(self._expected) or not as_expected(self._expected[call], sigma)
        if rising or astray:
            self._leave_contract(rising, sigma)
        if self._donor is None or call == 0 or not sigma > 0:
            return None
        if self._final is not None:
            d, kind = self._donor.at(sigma, self.request.cfg), "served"
        elif self._predictor is None or self._plan is None or call in self._plan.evaluated:
            return None
        else:
            d, kind = self._predictor.predict(sigma), "predicted"
            after = self._expected[call + 1] if call + 1 < len(self._expected) else 0.0
            self._gap += max(0.0, sigma - after)
        self.report.steps.append(StepLog(call, sigma, kind))
        return denoised_from(x, d, sigma)

    def _leave_contract(self, rising: bool, sigma: float) -> None:
        what = "rises again" if rising else "was not expected"
        sampler = self.request.sampler
        reason = f"the sampler {sampler!r} evaluates at sigma {sigma:.4f}, which {what}"
        self._recorder = None
        self.report.record = f"not recorded: {reason}"
        if self._donor is not None:
            self._go_dense(reason)
        elif self.match is not None and self.match.accepted:
            self.match = replace(self.match, decision="miss", reason=reason)
            self.report.judged(self.match)

    def _after(
        self, call: int, x: Tensor, sigma: float, evaluation: Evaluation, seconds: float
    ) -> None:
        error = None
        if call == 0:
            self._shape = tuple(x.shape)
            self._start(x, sigma, evaluation, seconds)
        elif call == 1:
            self._confirm(x, sigma, evaluation)
        if self._predictor is not None:
            d = derivative(x, evaluation.denoised, sigma).float()
            measured = self._predictor.add(sigma, d)
            if measured is not None:
                error = float(measured.mean())
                self._watch(call, sigma, error)
            if self._predictor is not None and self._predictor.weight is not None:
                weight = self._predictor.weight[0, 0]
                self._scope = weight if self._scope is None else (self._scope + weight) / 2
        if self._recorder is not None and sigma > 0:
            self._recorder.add(x, sigma, evaluation.denoised, evaluation.cond, evaluation.uncond)
        self.report.steps.append(StepLog(call, sigma, "evaluated", error and error**0.5))

    def _start(self, x: Tensor, sigma: float, evaluation: Evaluation, seconds: float) -> None:
        """The probe is made: decide, and prepare what the decision needs."""
        attention, self._attention = self._attention, None
        if self.store is None or not (self.settings.reuse or self.settings.record):
            off = blocked(self.settings, self.request, self._shape)
            self.report.reason = off or "there is no store"
            return
        made = signature(evaluation.denoised, evaluation.cond, evaluation.uncond, attention)
        self.probe = self._given or Probe(
            self.request, x.detach().clone(), sigma, evaluation, made, seconds
        )
        self._take(self.match or match(self.probe, self.settings, self.store), x.device)

    def _confirm(self, x: Tensor, sigma: float, evaluation: Evaluation) -> None:
        """The second evaluation is made: decide on a candidate."""
        self._given, found = None, self.match
        if found is not None and found.decision == "candidate":
            d = derivative(x, evaluation.denoised, sigma)
            found = confirm(found, d, sigma, self.settings, self.store)
        if found is not None and found.decision != "exact":
            self._take(found, x.device)

    def _take(self, verdict: Match, device: torch.device) -> None:
        """Report a verdict, and act on it where it is final."""
        self.match, report = verdict, self.report
        report.judged(verdict)
        final = verdict.decision == ("hit" if self._calls > 1 else "exact")
        if not final or verdict.donor is None or self.store is None:
            return
        try:
            self._load(verdict, device)
        except (RecordError, ValueError) as error:
            report.decision, report.reason = "miss", f"the donor's record was dropped: {error}"
            return
        self._recorder = None
        report.record = "not recorded: only dense runs are"
        report.donor, report.donor_label = verdict.donor.id, name_of(verdict.donor)

    def _load(self, verdict: Match, device: torch.device) -> None:
        """Read the donor's part of the schedule and set up the predictor or the exact service."""
        donor, store, table = verdict.donor, self.store, verdict.table
        assert donor is not None and store is not None and table is not None
        targets = [s for s in self._expected if s > 0]
        final = ["final"] * (verdict.decision == "exact")
        donor_run, extra = load(store, donor, targets, final, self.request.cfg)
        self._donor = donor_run.to(device)
        if verdict.decision == "exact":
            self._final = extra["final"]
            return
        self._plan = verdict.plan
        cfg = self.request.cfg
        position = schedule_position(self.request.sigmas)
        self._predictor = Predictor(lambda sigma: donor_run.at(sigma, cfg), position)
        peak = table.peak or 4.0 * float(donor.meta.get("rms", 1.0))
        self._guard = Guard(self.settings.budget, peak, table.guard)

    def _watch(self, call: int, sigma: float, error: float) -> None:
        """Hold what was measured against the budget; shorten the gaps or give the donor up."""
        if self._guard is None or self._plan is None:
            return
        verdict = self._guard.add(self._gap, error, 1 - sigma / self._expected[0])
        self._gap = 0.0
        if verdict == "stop":
            self._go_dense("the predictions so far are expected to cost more than the budget")
        elif verdict == "tighten":
            self._plan = self._plan.tightened(call)
            if not self._tightened:
                self._tightened = True
                self.report.note(f"From step {call + 1} on the gaps were shortened.")

    def _close(self) -> None:
        report = self.report
        report.closed(self._calls, time.perf_counter() - self._began, self._evaluation_seconds)
        if self._guard is not None:
            report.measured_db = self._guard.expected_db
        if self._scope is not None:
            scope = self._scope if self._scope.ndim == 3 else self._scope[None]
            report.scope = scope.detach().float().cpu().numpy().astype(np.float16)
        if report.donor and self.store is not None:
            self.store.note_hit(report.donor, report.seconds_saved)

    def _submit(self, latent: Tensor) -> None:
        if self._recorder is None or self.store is None:
            return
        vector = self.probe.signature if self.probe is not None else np.zeros(0, np.float16)
        made = draft(self.request, self._recorder, self._shape, latent, self.report.seconds, vector)
        if isinstance(made, str):
            self.report.record = f"not recorded: {made}"
            return
        self.store.submit(self.connectivity.joined(made))
        self.report.record = "submitted"
