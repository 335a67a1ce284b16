"""The pack in a real browser on a real server: what a creator sees and does, in both renderers.

The tests of this file are one session and build on each other. Their screenshots are kept in
build/screenshots (or $CARNATOR_SCREENSHOTS), to be looked at.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser import find_browser
from face import BADGE, CARDS, Face, prepare
from live_server import Server, install_pack

MISSING = (
    "BROWSER TESTS SKIPPED: no Chromium was found. Install one (Debian: apt-get install chromium) "
    "or name it in CARNATOR_BROWSER."
)
PROGRAM = find_browser()
if PROGRAM is None:
    warnings.warn(MISSING, stacklevel=1)
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_file: Path):
    base = tmp_path_factory.mktemp("face")
    install_pack(base, demo_file)
    prepare(base)
    running = Server(base)
    yield running
    running.close()


@pytest.fixture(scope="module")
def face(server: Server):
    browser = Face(PROGRAM or "", server)
    browser.open()
    yield browser
    browser.close()


def test_an_empty_store_says_what_to_do(face):
    face.open_tab()
    face.wait("document.querySelectorAll('.carnator-none li').length === 3")
    assert face.totals() == ["0", "0", "0 s"]
    face.shot("empty")
    face.click(".carnator-none .carnator-button")
    face.wait("app.graph._nodes.some(n => n.comfyClass === 'CarnatorAccelerate')")


def test_the_first_run_is_a_miss_and_becomes_a_card(face):
    assert face.run() == "miss"
    face.wait(f"{CARDS} === 1")
    shown = face.js("document.querySelector('.carnator-card').innerText")
    assert "red circle left and blue square still on gray" in shown
    assert "wan_tiny" in shown and "30 steps" in shown and "CFG 4" in shown
    assert face.totals()[:2] == ["1", "0"]
    size = "(i => i.complete && i.naturalWidth)(document.querySelector('.carnator-preview'))"
    assert face.wait(size) == 32
    assert (
        face.js("document.querySelectorAll('.carnator-box[role=status] .evaluated').length") == 30
    )


def test_a_changed_word_is_a_hit_on_the_node_and_in_the_sidebar(face):
    face.say("red circle left and blue square up on gray")
    assert face.run() == "hit"
    face.wait("document.querySelectorAll('.carnator-totals dd')[1].textContent === '1'")
    assert face.totals()[0] == "1", "a run that was a hit is no donor"
    assert "1 hit, saved" in face.js("document.querySelector('.carnator-card').innerText")
    line = face.js("document.querySelector('.carnator-box[role=status]').innerText")
    assert "red circle left and blue square still on gray" in line and "saved" in line
    kinds = "(k => document.querySelectorAll(`.carnator-box[role=status] .${k}`).length)"
    evaluated, predicted = face.js(f"{kinds}('evaluated')"), face.js(f"{kinds}('predicted')")
    assert evaluated + predicted == 30 and evaluated * 3 <= 30
    report = face.wait("document.querySelector('.carnator-text')?.textContent")
    assert report.startswith("Decision: hit") and f"Evaluations: {evaluated} of 30" in report
    face.fit()
    face.shot("hit")


def test_the_map_is_shown_on_demand(face):
    button = ".carnator-box[role=status] button"
    assert not face.js("!!document.querySelector('.carnator-map')")
    face.click(button)
    assert face.wait("document.querySelectorAll('.carnator-map canvas').length") == 4
    values = "[...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
    assert (
        face.js(f"(c => new Set({values}).size)(document.querySelector('.carnator-map canvas'))")
        > 9
    )
    assert face.js(f"document.querySelector('{button}').ariaExpanded") == "true"
    face.fit()
    face.shot("map")
    face.click(button)
    face.wait("!document.querySelector('.carnator-map')")


def test_a_run_that_is_left_alone_says_why_at_once(face):
    number = face.js("app.graph._nodes.find(n => n.comfyClass === 'CarnatorAccelerate').id")
    reason = "<img src=x onerror='window.fooled = 1'> because"
    told = {"nodes": [str(number), "7:9"], "state": "aside", "decision": "dense", "reason": reason}
    event = f"new CustomEvent('carnator.run', {{detail: {json.dumps(told)}}})"
    face.js(f"app.api.dispatchEvent({event}) && 0")
    line = face.js("document.querySelector('.carnator-box[role=status]').innerText")
    assert line.split("\n")[0] == "In full" and reason in line
    face.pause(0.2)
    assert not face.js("window.fooled")


def test_cards_are_pinned_by_keyboard_and_found_by_words(face, server):
    face.js("document.querySelector('.carnator-panel [type=search]').focus()")
    face.press("Tab")
    focused = "document.activeElement.ariaLabel"
    assert face.js(focused).startswith("Pin ")
    face.press("Enter")
    face.wait("document.activeElement.getAttribute('aria-pressed') === 'true'")
    assert face.js(focused).startswith("Unpin ")
    assert server.get("/carnator/records")["cards"][0]["pinned"]
    face.press("Tab")
    assert face.js(focused).startswith("Delete ")
    face.click(".carnator-panel [type=search]")
    face.type("hexagon")
    face.wait(f"{CARDS} === 0 && document.querySelector('.carnator-none').innerText.trim()")
    face.js("document.querySelector('.carnator-panel [type=search]').select()")
    face.type("BLUE wan_tiny")
    face.wait(f"{CARDS} === 1")


def test_all_is_there_after_a_reload_in_another_renderer_palette_and_language(face):
    face.set("Comfy.Locale", "fr")
    face.set("Comfy.VueNodes.Enabled", True)
    face.set("Comfy.ColorPalette", "light")
    face.open()
    face.open_tab()
    face.wait(f"{CARDS} === 1")
    assert face.js("document.querySelector('.carnator-totals dt').textContent") == "Gardées"
    assert face.js("document.querySelector('.carnator-card').classList.contains('pinned')")
    face.wait("app.graph._nodes.some(n => n.comfyClass === 'CarnatorAccelerate')")
    face.say("red circle left and blue square down on gray")
    assert face.run() == "hit"
    assert face.js(f"!!{BADGE}.closest('[data-node-id]')"), "this is not Nodes 2.0"
    face.wait("document.querySelectorAll('.carnator-totals dd')[1].textContent === '2'")
    face.fit()
    face.shot("light")


def test_settings_have_effect(face, server):
    face.set("Carnator.Store.Size", 2)
    assert server.get("/carnator/totals")["size_limit"] == 8 * 2**30, "as the last run had it"
    face.say("red circle left and blue square right on gray")
    face.run()
    assert server.get("/carnator/totals")["size_limit"] == 2 * 2**30
    face.wait("document.querySelector('.carnator-meter').title.includes('2 GB')")
    face.set("Carnator.Defaults.Preset", "faithful")
    face.set("Carnator.Defaults.NoisePolicy", "bank")
    made = (
        "(() => { const node = LiteGraph.createNode('CarnatorAccelerate'); app.graph.add(node);"
        "const found = node.widgets.slice(0, 2).map(w => w.value); app.graph.remove(node);"
        "return found; })()"
    )
    assert face.js(made) == ["faithful", "bank"]
    loaded = "app.graph._nodes.find(n => n.comfyClass === 'CarnatorAccelerate').widgets[0].value"
    assert face.js(loaded) == "fast", "a node that was there keeps its own"


def test_help_pages_and_their_pictures_are_served(face):
    where = "/extensions/ComfyUI-Carnator/docs/CarnatorAccelerate"
    page = face.js(f"fetch('{where}.md').then(answer => answer.text())")
    assert page.startswith("# Carnator Accelerate")
    assert face.js(f"fetch('{where}.png').then(answer => answer.ok)")


def test_deleting_asks_first_and_leaves_an_empty_store(face, server):
    face.click(".carnator-card .carnator-icon:last-child")
    face.wait("!!document.querySelector('[role=dialog]')")
    face.pause(0.4)
    face.shot("delete")
    assert server.get("/carnator/records")["records"] == 1
    confirm = (
        "(b => b && (b.id = 'confirm-it', true))"
        "([...document.querySelectorAll('[role=dialog] button')]"
        ".find(b => /supprimer/i.test(b.innerText)))"
    )
    face.wait(confirm)
    face.click("#confirm-it")
    face.wait(f"{CARDS} === 0 && document.querySelectorAll('.carnator-none li').length === 3")
    assert server.get("/carnator/records")["records"] == 0


def test_nothing_was_complained_of_and_nobody_else_asked(face):
    told = [p for p in face.problems if "carnator" in p.lower()]
    assert not told
    crashes = [p for p in face.problems if p.startswith("exception")]
    assert not crashes
    elsewhere = {urlsplit(r).hostname for r in face.requests} - {"127.0.0.1", None}
    assert not any("carnator" in str(host).lower() for host in elsewhere)
    assert "/carnator/" in " ".join(face.requests)
