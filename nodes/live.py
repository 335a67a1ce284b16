"""What a run is doing, told to the page that queued it while it does it.

Each message is one dictionary under the event ``carnator.run``, complete in itself: a page that
missed the ones before shows the same. Telling never costs a run its result.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any

from ..carnator.report import Report
from ..carnator.samplers import contract
from . import users

log = logging.getLogger("carnator")
EVENT = "carnator.run"
PAUSE = 0.1  # seconds between two messages of a run's steps, at least
KEPT = 32  # reports that can be asked for
MARKS = {"evaluated": "#", "predicted": ".", "served": "="}
LONGEST = 2000  # steps told one by one

_shown: deque[tuple[str, str, Report]] = deque(maxlen=KEPT)
_lock = Lock()


class Line:
    """Tells what runs do; ``node`` is the id of the node they are Carnator's by, beside the
    sampler's, and ``then`` is called with the report at their end."""

    def __init__(self, node: str = "", then: Callable[[Report], None] | None = None):
        self.node, self.then = node, then

    def __call__(self, report: Report) -> None:
        """The end of a run."""
        if self.then is not None:
            self.then(report)
        quietly(self._ended, report)

    def _ended(self, report: Report) -> None:
        found = uuid.uuid4().hex
        with _lock:
            _shown.append((found, users.of_run(), report))
        told = report.as_dict()
        scoped = told.pop("scope") is not None
        told["steps"] = marks(report)
        self.send({**told, "state": "done", "run": found, "map": scoped})

    def aside(self, reason: str) -> None:
        """A run is left alone."""
        quietly(self.send, {"state": "aside", "decision": "dense", "reason": reason})

    def send(self, data: dict[str, Any]) -> None:
        """Send to the page that queued the prompt; a prompt of no page has nobody to tell."""
        server = users.server()
        if server is None or server.client_id is None:
            return
        from comfy_execution.utils import get_executing_context

        context = get_executing_context()
        sampler = context.node_id if context is not None else server.last_node_id
        prompt = context.prompt_id if context is not None else server.last_prompt_id
        nodes = [str(node) for node in dict.fromkeys((self.node, sampler)) if node]
        server.send_sync(EVENT, {"nodes": nodes, "prompt": prompt, **data}, server.client_id)


def followed(steps: Any, told: Any) -> Callable[..., Any]:
    """The ``PREDICT_NOISE`` wrapper ``steps`` of a run, with ``told`` about each of its calls."""
    if not isinstance(told, Line):
        return steps
    run, rule = steps.run, contract(steps.run.request.sampler, steps.run.request.sampler_options)
    schedule = run.request.sigmas
    planned = len(rule.calls(schedule)) if len(schedule) > 1 else 0
    spent, last = 0.0, time.monotonic()

    def step() -> dict[str, Any]:
        report = run.report
        saved = sum(one.kind != "evaluated" for one in report.steps)
        return {
            "state": "running",
            "decision": report.decision,
            "reason": report.reason,
            "donor_label": report.donor_label,
            "steps": marks(report),
            "planned": planned,
            "evaluations": report.evaluations,
            "seconds_saved": saved * spent / max(1, report.evaluations),
        }

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal spent, last
        began, evaluated = time.monotonic(), run.report.evaluations
        result = steps(*args, **kwargs)
        now = time.monotonic()
        spent += now - began if run.report.evaluations > evaluated else 0.0
        if now - last >= PAUSE or len(run.report.steps) <= 2:
            last = now
            quietly(lambda: told.send(step()))
        return result

    quietly(told.send, {"state": "probe", "planned": planned})
    return call


def marks(report: Report) -> str:
    """The steps of a run as text: # evaluated, . predicted, = served."""
    return "".join(MARKS.get(one.kind, "?") for one in report.steps[:LONGEST])


def shown(run: str, user: str) -> Report | None:
    """The report of a run that a page of ``user`` was told of."""
    with _lock:
        return next((r for found, owner, r in _shown if found == run and owner == user), None)


def quietly(work: Callable[..., None], *args: Any) -> None:
    try:
        work(*args)
    except Exception as error:  # a page that cannot be told is no reason to fail a run
        log.debug("[Carnator] the page was not told (%s: %s)", type(error).__name__, error)
