"""The host's own executor and prompt validation in this process, without a server around them."""

from __future__ import annotations

import asyncio
import copy
import uuid
from types import SimpleNamespace
from typing import Any

import execution

CACHES = {kind.name.lower(): kind for kind in execution.CacheType}


class Failed(Exception):
    """The prompt did not end well; the message is the host's."""


class Machine:
    """An executor with one kind of node cache. ``ram`` is the free memory in GiB that the kind
    ``ram_pressure`` defends: more than there is makes it drop all it can."""

    def __init__(self, cache: str = "classic", ram: float = 0.0):
        self.events: list[tuple[str, dict]] = []
        server = SimpleNamespace(
            client_id="test",
            last_node_id=None,
            last_prompt_id=None,
            send_sync=lambda event, data, *_: self.events.append((str(event), data)),
            sockets_metadata={},
        )
        sizes = {"lru": 0, "ram": ram, "ram_inactive": ram}
        self.executor = execution.PromptExecutor(server, cache_type=CACHES[cache], cache_args=sizes)

    def run(self, prompt: dict) -> dict:
        """Validate and execute; the outputs by node. Raises Failed."""
        outputs = validated(prompt)
        number = uuid.uuid4().hex
        self.events.clear()
        self.executor.execute(copy.deepcopy(prompt), number, {"client_id": "test"}, outputs)
        if not self.executor.success:
            errors = [d for e, d in self.executor.status_messages if e.startswith("execution_")]
            raise Failed(str(errors[-1].get("exception_message", errors[-1])))
        return self.executor.history_result["outputs"]

    @property
    def ran(self) -> list[str]:
        """Ids of the nodes that the last prompt executed."""
        return [d["node"] for e, d in self.events if e == "executing" and d.get("node")]


def validated(prompt: dict) -> list[str]:
    """The output nodes of a prompt that the host accepts. Raises Failed with its errors."""
    checked = asyncio.run(execution.validate_prompt("test", copy.deepcopy(prompt), None))
    if not checked[0] or checked[3]:
        raise Failed(f"{checked[1]} {checked[3]}")
    return checked[2]


def node(kind: str, **inputs: Any) -> dict:
    return {"class_type": kind, "inputs": inputs}


def report_in(outputs: dict, number: str) -> dict:
    return outputs[number]["carnator"][0]
