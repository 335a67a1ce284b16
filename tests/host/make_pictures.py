"""Makes the pictures of README and the help pages from the pack as it is:

    COMFYUI_PATH=... python tests/host/make_pictures.py [SCREENS NODES]

It starts a server of its own on an empty folder and plays a short session in a real browser. Look
at what it made before it is kept.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from browser import find_browser
from face import CARDS, Face, prepare
from harness import ROOT
from live_server import Server, install_pack
from PIL import Image

DOCS, HELP, WORKFLOWS = ROOT / "docs", ROOT / "web" / "docs", ROOT / "workflows"
CAPTION = "red circle left and blue square {} on gray"
NODE_SIZE = {"CarnatorReport": [440, 760], "CarnatorDemoDecode": [320, 420]}


def shrink(path: Path) -> None:
    """The same picture in fewer bytes."""
    with Image.open(path) as picture:
        picture.convert("RGB").save(path, optimize=True)


class Maker:
    def __init__(self, face: Face):
        self.face = face

    def load(self, name: str) -> None:
        graph = json.dumps(json.loads((WORKFLOWS / f"{name}.json").read_text()))
        self.face.js(f"app.loadGraphData({graph}, true, true, {json.dumps(name)})")
        self.face.pause(2)

    def session(self, name: str, *words: str) -> None:
        """The graph of a workflow, run once for each of some words."""
        self.load(name)
        for word in words:
            self.face.say(CAPTION.format(word))
            before = self.face.js("window.carnatorRuns ?? 0")
            self.face.js(
                "window.carnatorRuns ??= (addEventListener('x', () => 0), app.api.addEventListener("
                "'execution_success', () => window.carnatorRuns++), 0)"
            )
            self.face.js("app.extensionManager.command.execute('Comfy.QueuePrompt')")
            self.face.wait(f"window.carnatorRuns > {before}", 120)
        self.face.pause(2)  # pictures load

    def screen(self, name: str) -> None:
        self.face.fit()
        self.face.pause(8)  # the host's own messages fade
        shrink(self.face.picture(DOCS / f"{name}.png"))

    def screens(self) -> None:
        face = self.face
        face.size(1640, 940)
        face.open_tab()
        self.session("carnator_demo", "still", "up")
        self.screen("workflow")
        face.js("document.querySelector('.carnator-card .carnator-icon').click()")
        self.session("carnator_demo", "down", "left")
        face.say("green triangle up and yellow circle right on black")
        face.run()
        face.wait(f"{CARDS} === 2")
        face.size(1640, 560)
        face.pause(2)
        shrink(face.picture(DOCS / "sidebar.png", ".carnator-panel"))
        face.size(1640, 940)
        self.session("carnator_pipeline_demo", "still", "up")
        self.screen("pipeline")

    def nodes(self) -> None:
        """A picture of every node, as it is after a hit, for its help page."""
        face = self.face
        face.size(1640, 1200)
        if face.js("!!document.querySelector('.carnator-panel')"):
            face.click(".carnator-tab-button")
        for name in ("carnator_demo", "carnator_pipeline_demo"):
            self.session(name, "still", "up")
            kinds = face.js(
                "app.graph._nodes.filter(n => n.comfyClass?.startsWith('Carnator'))"
                ".map(n => [n.comfyClass, n.id])"
            )
            for kind, number in kinds:
                size = json.dumps(NODE_SIZE.get(kind))
                face.js(
                    f"(() => {{ const node = app.graph.getNodeById({number}), ds = app.canvas.ds;"
                    f"node.title = node.constructor.title; const size = {size};"
                    "if (size) node.setSize(size); ds.scale = 1;"
                    "ds.offset = [200 - node.pos[0], 160 - node.pos[1]];"
                    "app.canvas.deselectAll?.(); app.canvas.setDirty(true, true); })()"
                )
                face.pause(0.8)
                shown = face.picture(HELP / f"{kind}.png", f"[data-node-id='{number}']", 8)
                shrink(shown)


def main(parts: list[str]) -> None:
    program = find_browser()
    if program is None:
        raise SystemExit("There is no Chromium here: install one, or set CARNATOR_BROWSER.")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        install_pack(base, ROOT / "carnator" / "demo" / "models" / "wan_tiny.safetensors")
        prepare(base)
        server = Server(base)
        try:
            face = Face(program, server)
            try:
                face.open()
                face.set("Comfy.VueNodes.Enabled", True)
                face.open()
                maker = Maker(face)
                for part in parts or ["SCREENS", "NODES"]:
                    getattr(maker, part.lower())()
            finally:
                face.close()
        finally:
            server.close()


if __name__ == "__main__":
    main(sys.argv[1:])
