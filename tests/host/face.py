"""The editor of a real server, with the pack in it, in a real browser."""

from __future__ import annotations

import json
import os
from pathlib import Path

from browser import Browser
from harness import HOST, ROOT
from live_server import Server

READY = (
    "!!(window.app?.extensionManager && app.graph"
    " && document.querySelector('.side-tool-bar-container'))"
)
RUN_SECONDS = 180
TAB = ".carnator-tab-button"
CARDS = "document.querySelectorAll('.carnator-card').length"
BADGE = "document.querySelector('.carnator-box[role=status] .carnator-badge')"
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.VueNodes.Enabled": False,
    "Comfy.ColorPalette": "dark",
    "Comfy.Minimap.Visible": False,
    "Comfy.InstalledVersion": "1.30.0",
}


def prepare(base: Path) -> None:
    """Settings of a user who has seen the editor before, in a server's folder."""
    user = base / "user" / "default"
    user.mkdir(parents=True)
    (user / "comfy.settings.json").write_text(json.dumps(SETTINGS))


class Face(Browser):
    """The editor of one server, with the pack in it."""

    def __init__(self, program: str, server: Server):
        super().__init__(program)
        self.server = server
        version = (HOST / "comfyui_version.py").read_text().split('"')[1] if HOST else ""
        kept = os.environ.get("CARNATOR_SCREENSHOTS") or ROOT / "build" / "screenshots"
        self.folder = Path(kept) / version

    def open(self) -> None:
        self.goto(self.server.url)
        self.wait(READY)
        self.wait("app.extensions.some(e => e.name === 'Carnator')")
        self.wait(f"!!document.querySelector('{TAB}')")

    def open_tab(self) -> None:
        if not self.js("!!document.querySelector('.carnator-panel')"):
            self.click(TAB)
        self.wait("!!document.querySelector('.carnator-panel .carnator-totals dd')")

    def set(self, name: str, value: object) -> None:
        self.js(f"app.extensionManager.setting.set({json.dumps(name)}, {json.dumps(value)})")

    def say(self, text: str) -> None:
        """Write a prompt into its node."""
        self.js(
            "(() => { const node = app.graph._nodes.find(n => n.title.startsWith('Prompt'));"
            f"node.widgets.find(w => w.name === 'text').value = {json.dumps(text)}; }})()"
        )

    def run(self) -> str:
        """Queue the graph as the Run button does; the decision shown on the node at the end."""
        line = "document.querySelector('.carnator-box[role=status]')"
        self.js(f"{line}.dataset.state = 'before'")
        self.js("app.extensionManager.command.execute('Comfy.QueuePrompt')")
        self.wait(f"{line}?.dataset.state === 'done'", RUN_SECONDS)
        return self.js(f"{BADGE}.className.split(' ').at(-1)")

    def totals(self) -> list[str]:
        return self.js(
            "[...document.querySelectorAll('.carnator-totals dd')].map(e => e.textContent)"
        )

    def shot(self, name: str, selector: str | None = None, margin: float = 0) -> None:
        self.picture(self.folder / f"{name}.png", selector, margin)

    def fit(self) -> None:
        """Show the whole graph beside the sidebar, as large as it goes."""
        self.js(
            """(() => {
              const own = app.canvas.canvas.getBoundingClientRect();
              const side = document.querySelector('.carnator-panel')?.getBoundingClientRect();
              const left = Math.max(own.left, side?.right ?? 0) - own.left + 20, top = 96;
              const boxes = [...app.graph._nodes, ...app.graph._groups].map(n => n.boundingRect
                ?? [...n.pos, ...n.size]);
              const [x, y] = [0, 1].map(i => Math.min(...boxes.map(b => b[i])));
              const [right, bottom] = [0, 1].map(i => Math.max(...boxes.map(b => b[i] + b[i + 2])));
              const ds = app.canvas.ds;
              ds.scale = Math.min((own.width - left - 20) / (right - x),
                (own.height - top - 20) / (bottom - y));
              ds.offset = [left / ds.scale - x, top / ds.scale - y];
              app.canvas.deselectAll?.();
              app.canvas.setDirty(true, true);
            })()"""
        )
        self.pause(0.6)
