"""What the page may ask over HTTP, through the host's own middleware and user manager."""

from __future__ import annotations

import asyncio
import io
import json
import types
from pathlib import Path
from typing import Any

import folder_paths
import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from harness import part
from PIL import Image

stores, users, live = part("carnator.store"), part("nodes.users"), part("nodes.live")
NAMES = "stores", "records", "changes", "totals"


class Page:
    """Requests as a page of the editor makes them; ``headers`` on top of the browser's own."""

    def __init__(self, client: TestClient, loop: asyncio.AbstractEventLoop):
        self.client, self.loop = client, loop
        self.headers: dict[str, str] = {}

    def ask(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        headers = {**self.headers, **options.pop("headers", {})}

        async def asked() -> tuple[int, Any]:
            path_ = f"/carnator/{path}"
            async with self.client.request(method, path_, headers=headers, **options) as answer:
                held = await answer.read()
                kind = answer.content_type
                return answer.status, json.loads(held) if kind == "application/json" else held

        return self.loop.run_until_complete(asked())

    def get(self, path: str, **query: Any) -> Any:
        status, answer = self.ask("GET", path, params=query)
        assert status == 200, answer
        return answer

    def post(self, path: str, **body: Any) -> Any:
        status, answer = self.ask("POST", path, json=body)
        assert status == 200, answer
        return answer


@pytest.fixture
def make_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes the page of a server whose user directory is the test's own."""
    import server  # not at the top: it takes seconds
    from app.user_manager import UserManager
    from comfy.cli_args import args

    monkeypatch.setattr(folder_paths, "user_directory", str(tmp_path / "user"))
    loop, closing = asyncio.new_event_loop(), []

    def make(multi_user: bool = False) -> Page:
        monkeypatch.setattr(args, "multi_user", multi_user)
        instance = types.SimpleNamespace(
            routes=web.RouteTableDef(), user_manager=UserManager(), client_id=None
        )
        monkeypatch.setattr(server.PromptServer, "instance", instance, raising=False)
        part("nodes.routes").register()
        app = web.Application(middlewares=[server.create_origin_only_middleware()])
        app.add_routes(instance.routes)
        client = TestClient(TestServer(app), loop=loop)
        loop.run_until_complete(client.start_server())
        closing.append(client)
        page = Page(client, loop)
        page.manager = instance.user_manager
        page.server = instance
        return page

    yield make
    for client in closing:
        loop.run_until_complete(client.close())
    loop.close()


@pytest.fixture
def page(make_page):
    return make_page()


def record(label: str, number: int) -> Any:
    generator = torch.Generator().manual_seed(number)
    latent = torch.randn(1, 16, 4, 16, 16, generator=generator)
    tensors = {"final": latent, stores.PREVIEW: stores.make_preview(latent)}
    meta = {"label": label, "seconds": 2.0, "sigmas": [1.0, 0.5], "sampler": "euler"}
    meta["labels"] = {"model": "tiny.safetensors"}
    return stores.Draft("aa", f"{number:02x}", meta, tensors, np.ones(4, np.float16))


@pytest.fixture
def filled(page):
    """A page with three records in the store of its nodes; their ids, oldest first."""
    store = part("nodes.store").default_store().open()
    page.records = [store.put(record(f"a {c} circle", n)) for n, c in enumerate(("red", "blue"))]
    page.records.append(store.put(record("a green square", 2)))
    yield page
    store.close()


def test_records_are_listed_searched_and_paged(filled):
    told = filled.get("records")
    assert [card["id"] for card in told["cards"]] == filled.records[::-1]
    first = told["cards"][0]
    assert first["label"] == "a green square" and first["model"] == "tiny.safetensors"
    assert (told["records"], told["more"], told["hits"]) == (3, False, 0)
    assert 0 < told["bytes"] < told["size_limit"] == 8 * 2**30
    found = filled.get("records", search="CIRCLE", count=1)
    assert [card["label"] for card in found["cards"]] == ["a blue circle"] and found["more"]
    rest = filled.get("records", search="circle", start=1, count=1)
    assert [card["label"] for card in rest["cards"]] == ["a red circle"] and not rest["more"]
    assert filled.get("totals")["records"] == 3


def test_a_preview_is_a_small_moving_picture(filled):
    shown = filled.get(f"preview/{filled.records[0]}")
    with Image.open(io.BytesIO(shown)) as picture:
        assert (picture.format, picture.n_frames, picture.size) == ("WEBP", 4, (16, 16))
    assert filled.ask("GET", f"preview/{'0' * 32}")[0] == 404


def test_what_is_done_to_records_is_counted_as_a_change(filled):
    first, second, third = filled.records
    seen = [filled.get("changes")["changes"]]
    assert filled.get("changes")["changes"] == seen[0]
    assert filled.post("pin", ids=[first, second], pinned=True)["done"] == 2
    seen.append(filled.get("changes")["changes"])
    cards = {card["id"]: card["pinned"] for card in filled.get("records")["cards"]}
    assert cards == {first: True, second: True, third: False}
    filled.post("pin", ids=[second], pinned=False)
    assert not filled.get("records")["cards"][1]["pinned"]
    assert filled.post("delete", ids=[second, "0" * 32])["deleted"] == 1
    seen.append(filled.get("changes")["changes"])
    assert filled.get("totals")["records"] == 2
    assert len(set(seen)) == len(seen)


def test_clearing_needs_the_number_that_was_shown(filled):
    for wrong in (None, "3", True, 2, 4, 3.0):
        status, answer = filled.ask("POST", "clear", json={"confirm": wrong})
        assert status == 400 and "3 records" in answer["error"]
    assert filled.get("totals")["records"] == 3
    assert filled.post("clear", confirm=3)["records"] == 0
    assert filled.get("records")["cards"] == []


@pytest.mark.parametrize("name", ["pin", "delete", "clear", "hello"])
def test_nothing_is_changed_by_what_another_page_can_send(filled, name):
    body = json.dumps({"ids": filled.records, "pinned": True, "confirm": 3, "client": "x" * 32})
    assert filled.ask("GET", name)[0] == 405
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert filled.ask("POST", name, data=body, headers={"Content-Type": kind})[0] == 415
    plain = {"Content-Type": "application/json"}
    for origin in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://elsewhere.example"}):
        assert filled.ask("POST", name, data=body, headers=plain | origin)[0] == 403
        assert filled.ask("GET", "records", headers=origin)[0] == 403
    assert filled.get("totals")["records"] == 3
    assert not any(card["pinned"] for card in filled.get("records")["cards"])


@pytest.mark.parametrize(
    "path",
    [
        "records?start=-1",
        "records?count=201",
        "records?count=1e3",
        "records?start=" + "9" * 30,
        "records?search=" + "a" * 201,
        "records?store=../../etc",
        "records?store=/etc",
        "changes?store=0123456789abcdef",
        "preview/..%2f..%2fetc%2fpasswd",
        "preview/" + "A" * 32,
        "preview/" + "0" * 33,
    ],
)
def test_bad_questions_are_told_so(filled, path):
    status, answer = filled.ask("GET", path)
    assert status == 400 and answer["error"].endswith((".", ".'"))


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("pin", {}),
        ("pin", {"ids": [], "pinned": True}),
        ("pin", {"ids": ["0" * 32], "pinned": "yes"}),
        ("pin", {"ids": ["0" * 32], "pinned": True, "store": ["x"]}),
        ("pin", {"ids": ["0" * 32], "pinned": True, "store": {"folder": "/etc"}}),
        ("delete", {"ids": "0" * 32}),
        ("delete", {"ids": ["../" * 10]}),
        ("delete", {"ids": ["0" * 32] * 1001}),
        ("delete", {"ids": [7]}),
        ("hello", {"client": 7}),
        ("hello", {"client": "a b c d e f g h"}),
    ],
)
def test_bad_orders_are_told_so(filled, name, body):
    status, answer = filled.ask("POST", name, json=body)
    assert status == 400 and answer["error"]
    assert filled.get("totals")["records"] == 3


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"[" * 50_000, b"\xff", b"null"])
def test_a_body_that_is_no_object_is_refused(page, body):
    headers = {"Content-Type": "application/json"}
    assert page.ask("POST", "delete", data=body, headers=headers)[0] == 400


def test_a_body_too_long_is_refused(page):
    body, headers = b'{"a": "' + b"x" * 2**18 + b'"}', {"Content-Type": "application/json"}
    assert page.ask("POST", "delete", data=body, headers=headers)[0] == 413


def test_stores_that_nodes_used_are_listed_but_no_other(page, tmp_path):
    node = part("nodes.store").CarnatorStore
    elsewhere = tmp_path / "elsewhere"
    choice = node.execute(str(elsewhere), 1.0)[0]
    choice.open().put(record("kept elsewhere", 1))
    own, *others = page.get("stores")["stores"]
    assert own["name"] == "" and str(tmp_path) not in json.dumps(others)
    (other,) = [one for one in others if one["name"] == "elsewhere"]
    told = page.get("records", store=other["store"])
    assert [card["label"] for card in told["cards"]] == ["kept elsewhere"]
    assert told["size_limit"] == 2**30
    assert page.get("records")["cards"] == []
    card = told["cards"][0]["id"]
    assert page.post("delete", ids=[card], store=other["store"])["records"] == 0


def test_settings_choose_the_store_of_unconnected_nodes(page, tmp_path):
    store, folder = part("nodes.store"), tmp_path / "user" / "default"
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "comfy.settings.json"
    settings.write_text(json.dumps({store.FOLDER: str(tmp_path / "big"), store.SIZE: 2}))
    opened = store.default_store().open()
    assert (opened.folder, opened.size_limit) == (tmp_path / "big", 2 * 2**30)
    assert page.get("totals")["size_limit"] == 2 * 2**30
    for bad in ({store.SIZE: "2"}, {store.SIZE: -1}, {store.SIZE: 1e9, store.FOLDER: 7}, [], 3):
        settings.write_text(json.dumps(bad))
        opened = store.default_store().open()
        assert opened.size_limit == 8 * 2**30 and opened.folder.name == "store"
    settings.write_text("{")
    assert store.default_store().open().size_limit == 8 * 2**30


def test_users_of_a_server_see_their_own_records_only(make_page, tmp_path, monkeypatch):
    page, default = make_page(multi_user=True), part("nodes.store").default_store()
    ann, bob = (page.manager.add_user(name) for name in ("Ann", "Bob"))
    assert page.ask("GET", "records")[0] == 401
    assert page.ask("GET", "records", headers={"comfy-user": "__carnator"})[0] == 401
    for user, client, label in ((ann, "a" * 32, "of Ann"), (bob, "b" * 32, "of Bob")):
        page.headers = {"comfy-user": user}
        page.post("hello", client=client)
        page.server.client_id = client
        default.open().put(record(label, 1))
    page.server.client_id = "c" * 32  # a client of no page
    default.open().put(record("of nobody", 1))
    for user, label in ((ann, "of Ann"), (bob, "of Bob")):
        page.headers = {"comfy-user": user}
        cards = page.get("records")["cards"]
        assert [card["label"] for card in cards] == [label]
    anns = page.ask("GET", "records", headers={"comfy-user": ann})[1]["cards"][0]["id"]
    page.headers = {"comfy-user": bob}
    assert page.ask("GET", f"preview/{anns}")[0] == 404
    assert page.post("delete", ids=[anns])["deleted"] == 0
    assert page.post("clear", confirm=1)["records"] == 0
    page.headers = {"comfy-user": ann}
    assert page.get("totals")["records"] == 1
    # Whatever a user sets, the place of the store is the server's.
    folder = Path(folder_paths.get_public_user_directory(ann))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comfy.settings.json").write_text(
        json.dumps({part("nodes.store").FOLDER: str(tmp_path / "bad")})
    )
    assert page.get("totals")["records"] == 1 and not (tmp_path / "bad").exists()


def test_a_store_that_cannot_be_used_is_told_and_nothing_else(page, tmp_path):
    (tmp_path / "user" / "default").mkdir(parents=True, exist_ok=True)
    (tmp_path / "file").write_text("")
    settings = {part("nodes.store").FOLDER: str(tmp_path / "file")}
    (tmp_path / "user" / "default" / "comfy.settings.json").write_text(json.dumps(settings))
    for name in NAMES[1:]:
        status, answer = page.ask("GET", name)
        assert status == 503 and "choose another folder" in answer["error"]


def test_reports_are_shown_to_whom_they_were_told(page):
    report = part("carnator.report").Report("hit", "because", evaluations=8, dense_evaluations=30)
    report.scope = np.full((2, 3, 3), 0.5, np.float16)
    sent = []
    page.server.client_id, page.server.last_node_id, page.server.last_prompt_id = "c", "7", "p"
    page.server.send_sync = lambda event, data, client: sent.append((event, data, client))
    live.Line("4")(report)
    ((event, data, client),) = sent
    assert (event, client, data["nodes"]) == ("carnator.run", "c", ["4", "7"])
    assert data["state"] == "done" and data["map"] and "scope" not in data
    told = page.get(f"runs/{data['run']}")
    assert np.shape(told["scope"]) == (2, 3, 3) and told["reason"] == "because"
    assert page.ask("GET", f"runs/{'0' * 32}")[0] == 404
    page.server.client_id = None  # a script's prompt: nobody is told, least of all everybody
    live.Line("4")(report)
    assert len(sent) == 1
