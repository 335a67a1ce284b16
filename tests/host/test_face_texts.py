"""Texts that come with the pack: translations, help pages, and what the page's code asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, part
from PIL import Image

NODES = {n.GET_SCHEMA().node_id: n.GET_SCHEMA() for n in part("nodes").NODES}
LOCALES, WEB = ROOT / "locales", ROOT / "web"
LANGUAGES = sorted(folder.name for folder in LOCALES.iterdir() if folder.is_dir())
OTHERS = [name for name in LANGUAGES if name != "en"]
FILES = ("main.json", "nodeDefs.json", "settings.json")
PARTS = {"name", "tooltip", "description", "display_name"}


def read(language: str, name: str) -> dict[str, Any]:
    return json.loads((LOCALES / language / name).read_text(encoding="utf-8"))


def leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    if isinstance(tree, str):
        return {path: tree}
    return {k: v for key in tree for k, v in leaves(tree[key], (*path, key)).items()}


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"\{\w+\}", text))


def scripts() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(WEB.glob("*.js")))


def test_there_is_a_second_language():
    assert OTHERS


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("name", FILES)
def test_a_translation_has_the_keys_of_the_english_texts(language, name):
    english, other = leaves(read("en", name)), leaves(read(language, name))
    assert set(other) == set(english)
    for path, text in other.items():
        assert text.strip() and placeholders(text) == placeholders(english[path]), path
    # Names of nodes, inputs and values stay, since the English help and workflows name them.
    free = [p for p in english if p[-1] not in ("name", "display_name") and " " in english[p]]
    assert not [p for p in free if other[p] == english[p] and len(english[p]) > 20]


@pytest.mark.parametrize("language", LANGUAGES)
def test_translations_name_what_the_nodes_have(language):
    held = read(language, "nodeDefs.json")
    assert set(held) == set(NODES)
    for node, schema in NODES.items():
        assert set(held[node]["inputs"]) == {i.id for i in schema.inputs}, node
        assert len(held[node]["outputs"]) == len(schema.outputs), node


def test_the_page_asks_for_texts_that_are_there():
    texts, code = read("en", "main.json")["carnator"], scripts()
    asked = set(re.findall(r"\bt\(\s*\"(\w+)\"", code))
    asked |= {
        a for pair in re.findall(r"\bt\([^\"()]*\? \"(\w+)\" : \"(\w+)\"", code) for a in pair
    }
    asked |= set(re.findall(r"\"(title\w+)\"", code))
    asked |= {f"badge_{k}" for k in ("probe", "hit", "exact", "miss", "dense")}
    asked |= {"empty1", "empty2", "empty3", "evaluated", "predicted", "served"}
    assert asked - set(texts) == set()
    assert set(texts) - asked == set(), "texts that nothing asks for"


def test_settings_have_english_texts():
    code = (WEB / "settings.js").read_text(encoding="utf-8")
    ids = set(re.findall(r"\"(Carnator\.\w+\.\w+)\"", code))
    held = read("en", "settings.json")
    assert {name.replace(".", "_") for name in ids} == set(held)
    joined = re.sub(r"\"\s*\+\s*\"", "", code)
    for texts in held.values():
        assert f'"{texts["name"]}"' in joined and f'"{texts["tooltip"]}"' in joined
    store = part("nodes.store")
    assert {store.FOLDER, store.SIZE} <= ids, "the server reads other settings"


@pytest.mark.parametrize("node", NODES)
def test_every_node_has_a_help_page(node):
    page = (WEB / "docs" / f"{node}.md").read_text(encoding="utf-8")
    schema = NODES[node]
    assert page.startswith(f"# {schema.display_name}\n")
    for item in schema.inputs:
        assert re.search(rf"\b{item.id}\b", page), f"nothing on the input {item.id}"
    for output in schema.outputs:
        assert (output.display_name or output.get_io_type()) in page
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert pictures
    for name in pictures:
        with Image.open(WEB / "docs" / name) as picture:
            assert min(picture.size) > 100


def test_no_page_is_of_a_node_that_is_not_there():
    pages = {path.stem for path in (WEB / "docs").glob("*.md")}
    assert pages == set(NODES)


def test_the_page_asks_nothing_of_the_internet():
    for path in [*WEB.rglob("*.js"), *WEB.rglob("*.css"), *WEB.rglob("*.md")]:
        assert not re.search(r"https?://", path.read_text(encoding="utf-8")), path.name


@pytest.mark.parametrize("word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"])
def test_what_records_say_is_shown_as_text(word):
    """Labels and reasons are untrusted; they reach the page by textContent and attributes alone."""
    assert "textContent" in scripts() and word not in scripts()


def test_style_keeps_to_its_own_names():
    style = "\n".join(path.read_text(encoding="utf-8") for path in WEB.glob("*.css"))
    assert len(style) > 1000
    plain = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    for selector in re.findall(r"([^{}]+)\{", plain):
        for one in selector.split(","):
            assert ".carnator-" in one, f"{one.strip()!r} would style the host"


def test_every_script_is_small_and_plain():
    names = {path.name for path in WEB.glob("*.js")}
    assert "carnator.js" in names
    for path in WEB.glob("*.js"):
        for source in re.findall(r"from \"([^\"]+)\"", path.read_text(encoding="utf-8")):
            own = source.startswith("./") and Path(source).name in names
            assert own or source in ("../../scripts/app.js", "../../scripts/api.js"), source
