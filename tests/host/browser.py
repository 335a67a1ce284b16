"""A real browser, headless, driven over its own debugging protocol: no driver to install.

The tests see a page as a person does: they move the mouse, press keys and look at the pixels.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_SECONDS, PATIENCE = 60, 30
WIDTH, HEIGHT = 1500, 900
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # CI runs as root; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # no page may reach the internet
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
    f"--window-size={WIDTH},{HEIGHT}",
)
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32, "Delete": 46, "Backspace": 8}


def find_browser() -> str | None:
    """The program named by $CARNATOR_BROWSER, or the first Chromium on the path."""
    named = os.environ.get("CARNATOR_BROWSER")
    if named:
        if not shutil.which(named):
            raise FileNotFoundError(
                f"CARNATOR_BROWSER={named!r} is no program: correct or unset it."
            )
        return shutil.which(named)
    return next(filter(None, map(shutil.which, NAMES)), None)


class PageError(AssertionError):
    """The page did not do what was waited for."""


class Browser:
    """One browser process with one page; ``close`` ends it."""

    def __init__(self, program: str):
        self.profile = tempfile.mkdtemp(prefix="browser-")
        self.process = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={self.profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.loop = asyncio.new_event_loop()
        self.problems: list[str] = []  # what the page complained of
        self.requests: list[str] = []  # addresses it asked for
        self.dialogs: list[str] = []  # questions it asked; all are answered with yes
        self._number, self._answers = 0, {}
        try:
            self._do(self._connect())
            for part in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{part}.enable")
            self.size(WIDTH, HEIGHT)
        except BaseException:
            self.close()
            raise

    def _do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def _connect(self) -> None:
        until, told = time.monotonic() + START_SECONDS, Path(self.profile, "DevToolsActivePort")
        while not told.exists() or not told.read_text().strip():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"The browser did not start (exit {self.process.poll()}).")
            await asyncio.sleep(0.05)
        port = told.read_text().split()[0]
        self.session = aiohttp.ClientSession()
        async with self.session.get(f"http://127.0.0.1:{port}/json") as answer:
            (page,) = [one for one in await answer.json() if one["type"] == "page"]
        self.socket = await self.session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        self._reading = self.loop.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.socket:
            told = json.loads(message.data)
            if "id" in told:
                waiting = self._answers.pop(told["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(told)
                continue
            kind, data = told["method"], told["params"]
            if kind == "Runtime.exceptionThrown":
                details = data["exceptionDetails"]
                text = details.get("exception", {}).get("description", details["text"])
                self.problems.append(f"exception: {text}")
            elif kind == "Runtime.consoleAPICalled" and data["type"] in ("error", "assert"):
                said = " ".join(str(a.get("value", a.get("description"))) for a in data["args"])
                self.problems.append(f"console: {said}")
            elif kind == "Log.entryAdded" and data["entry"]["level"] == "error":
                self.problems.append(f"log: {data['entry']['text']} {data['entry'].get('url')}")
            elif kind == "Network.requestWillBeSent":
                self.requests.append(data["request"]["url"])
            elif kind == "Page.javascriptDialogOpening":
                self.dialogs.append(data["message"])
                self.loop.create_task(self._ask("Page.handleJavaScriptDialog", {"accept": True}))

    async def _ask(self, method: str, params: dict) -> dict:
        self._number += 1
        waiting = self._answers[self._number] = self.loop.create_future()
        await self.socket.send_json({"id": self._number, "method": method, "params": params})
        return await asyncio.wait_for(waiting, PATIENCE)

    def call(self, method: str, **params: Any) -> dict:
        """One command of the protocol and its result."""
        answer = self._do(self._ask(method, params))
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']}")
        return answer["result"]

    def js(self, expression: str) -> Any:
        """The value of an expression in the page, promises waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = PATIENCE) -> Any:
        """The value of an expression once it is true."""
        until = time.monotonic() + seconds
        while True:
            try:
                value = self.js(expression)
            except PageError as error:  # the page may be loading still
                value, last = None, error
            else:
                last = None
            if value:
                return value
            if time.monotonic() > until:
                raise PageError(f"waited {seconds} s in vain for: {expression}\n{last or ''}")
            self.pause(0.1)

    def pause(self, seconds: float) -> None:
        self._do(asyncio.sleep(seconds))

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of the first element of a selector on the screen."""
        found = self.wait(
            f"(e => e && (e.scrollIntoView({{block: 'nearest'}}), "
            f"(r => r.width && [r.x, r.y, r.width, r.height])(e.getBoundingClientRect())))"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        return tuple(found)

    def click(self, selector: str) -> None:
        """A click into the middle of an element, by the mouse, once nothing lies over it."""
        self.box(selector)
        self.wait(
            f"(e => (r => e.contains(document.elementFromPoint(r.x + r.width / 2, "
            f"r.y + r.height / 2)))(e.getBoundingClientRect()))"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        left, top, width, height = self.box(selector)
        at = {"x": left + width / 2, "y": top + height / 2, "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at["x"], y=at["y"])
        self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def press(self, key: str) -> None:
        given = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {})
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, selector: str | None = None, margin: float = 0) -> Path:
        """What is on the screen, or the part of it that an element takes, as a PNG file."""
        options: dict[str, Any] = {"format": "png"}
        if selector is not None:
            left, top, width, height = self.box(selector)
            options["clip"] = {
                "x": max(0, left - margin),
                "y": max(0, top - margin),
                "width": width + 2 * margin,
                "height": height + 2 * margin,
                "scale": 1,
            }
        data = self.call("Page.captureScreenshot", **options)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))
        return path

    def close(self) -> None:
        async def leave() -> None:
            if hasattr(self, "_reading"):
                self._reading.cancel()
                await asyncio.gather(self._reading, return_exceptions=True)
            if hasattr(self, "session"):
                await self.session.close()

        if not self.loop.is_closed():
            self._do(leave())
            self.loop.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)
