"""A real ComfyUI server with the pack in its custom_nodes, driven over HTTP and websocket."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from harness import HOST, ROOT

START_SECONDS = 600  # a generous bound on importing the host on a busy machine
RUN_SECONDS = 600
PARTS = ("nodes", "carnator", "web", "locales", "workflows")


def install_pack(base: Path, model: Path) -> Path:
    """A copy of the pack in ``base``/custom_nodes, with a demo model in it."""
    target = base / "custom_nodes" / "ComfyUI-Carnator"
    for name in PARTS:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
    for name in ("__init__.py", "pyproject.toml"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, target / name)
    models = target / "carnator" / "demo" / "models"
    models.mkdir(exist_ok=True)
    if not (models / "wan_tiny.safetensors").exists():
        shutil.copy(model, models / "wan_tiny.safetensors")
    return target


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """The server process; ``close`` ends it. Its output goes to ``base``/server.log."""

    def __init__(self, base: Path):
        assert HOST is not None
        self.base = base
        for name in ("user", "input", "output", "temp", "models"):
            (base / name).mkdir(exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = base / "server.log"
        command = [sys.executable, "main.py", "--cpu", "--use-pytorch-cross-attention"]
        command += ["--port", str(self.port), "--base-directory", str(base)]
        command += ["--disable-api-nodes"]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=HOST, stdout=out, stderr=subprocess.STDOUT, env=environment
            )
        asyncio.run(self._wait_until_up())

    async def _wait_until_up(self) -> None:
        until = time.monotonic() + START_SECONDS
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < until:
                if self.process.poll() is not None:
                    raise RuntimeError(f"The server ended at start:\n{self.tail()}")
                try:
                    async with session.get(f"{self.url}/system_stats") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.3)
        raise RuntimeError(f"The server did not come up:\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text()[-4000:]

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path: str) -> Any:
        """The JSON behind a path."""

        async def fetch() -> Any:
            async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
                assert answer.status == 200, path
                return await answer.json()

        return asyncio.run(fetch())

    def view(self, image: dict) -> bytes:
        """The file of an image in a node's outputs."""

        async def fetch() -> bytes:
            url = f"{self.url}/view"
            async with aiohttp.ClientSession() as session, session.get(url, params=image) as answer:
                assert answer.status == 200
                return await answer.read()

        return asyncio.run(fetch())

    def refused(self, prompt: dict) -> dict:
        """The answer to a prompt that must not be queued."""

        async def post() -> dict:
            url, body = f"{self.url}/prompt", {"prompt": prompt}
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                assert answer.status == 400, await answer.text()
                return await answer.json()

        return asyncio.run(post())

    def run(self, prompt: dict, on_progress: Callable[[dict], bool] | None = None) -> dict:
        """Queue an API-format prompt and wait for its end; returns its history entry with the
        websocket's messages under ``events``. ``on_progress`` returns True to interrupt."""
        return asyncio.run(self._run(prompt, on_progress))

    async def _run(self, prompt: dict, on_progress: Callable[[dict], bool] | None) -> dict:
        client, events = uuid.uuid4().hex, []
        timeout = aiohttp.ClientTimeout(total=RUN_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async with session.ws_connect(f"{self.url}/ws?clientId={client}") as socket:
                body = {"prompt": prompt, "client_id": client}
                async with session.post(f"{self.url}/prompt", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    number = (await answer.json())["prompt_id"]
                async for message in socket:
                    if message.type != aiohttp.WSMsgType.TEXT:
                        continue
                    event = json.loads(message.data)
                    events.append(event)
                    kind, data = event["type"], event["data"]
                    if kind == "progress" and on_progress and on_progress(data):
                        await session.post(f"{self.url}/interrupt")
                    ended = kind == "executing" and data.get("node") is None
                    failed = kind in ("execution_error", "execution_interrupted")
                    if (ended or failed) and data.get("prompt_id") == number:
                        break
            for _ in range(100):  # the history is written just after the last message
                async with session.get(f"{self.url}/history/{number}") as answer:
                    history = await answer.json()
                if number in history:
                    return {**history[number], "events": events}
                await asyncio.sleep(0.1)
        raise RuntimeError(f"The prompt left no history:\n{self.tail()}")


def node_of(prompt: dict, kind: str) -> str:
    """Id of the only node of a kind in an API-format prompt."""
    (found,) = [i for i, node in prompt.items() if node["class_type"] == kind]
    return found


def report_of(entry: dict, prompt: dict) -> dict:
    """The data of the Report node in a history entry."""
    return entry["outputs"][node_of(prompt, "CarnatorReport")]["carnator"][0]
