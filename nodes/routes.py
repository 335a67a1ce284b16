"""What the page may ask of the stores, over HTTP, all under ``/carnator/``.

The host lets in only what it lets in elsewhere (same origin, its users). Stores and records are
named by ids of our own, never by a path, and everything that changes something is a POST of JSON,
which a foreign page cannot send. Store work is done in a thread, so that the server goes on.
"""

from __future__ import annotations

import asyncio
import functools
import io
import json
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web
from PIL import Image

from ..carnator.store import Store, StoreError
from ..carnator.store.record import is_record_id
from . import live, users
from .places import key_of, used_by
from .store import set_by

log = logging.getLogger("carnator")
MOST_CARDS, MOST_IDS, MOST_SEARCH = 200, 1000, 200
MOST_BODY = 2**17  # bytes
FRAME = 160  # milliseconds that a frame of a preview is shown
_threads = ThreadPoolExecutor(2, "carnator-routes")  # each has a connection to each database
KEEP = "private, max-age=86400, immutable"  # a record never changes


class Bad(ValueError):
    """A request that cannot be answered, and why."""


@dataclass(frozen=True)
class Asked:
    """A request: who asks, what is in its address, its route and its body."""

    user: str
    query: dict[str, str]
    named: dict[str, str]
    body: dict[str, Any]

    def store(self) -> Store:
        """The store asked for, else the user's own. StoreError, Bad."""
        own, wanted = set_by(self.user), self.query.get("store") or self.body.get("store") or ""
        used = used_by(self.user)
        if wanted in ("", key_of(own.folder)):
            # As its last run used it: a node may have given it another size.
            return used.get(key_of(own.folder), own).open_for(self.user)
        if not isinstance(wanted, str) or wanted not in used:
            raise Bad("There is no such store: ask for the list of stores again.")
        return used[wanted].open_for(self.user)

    def number(self, name: str, default: int, most: int) -> int:
        text = self.query.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) > most:
            raise Bad(f"{name!r} is {text!r:.40}: give a whole number from 0 to {most}.")
        return int(text)

    def ids(self) -> list[str]:
        ids = self.body.get("ids")
        if not isinstance(ids, list) or not 0 < len(ids) <= MOST_IDS:
            raise Bad(f"'ids' has to be a list of 1 to {MOST_IDS} ids of records.")
        if not all(map(is_record_id, ids)):
            raise Bad("'ids' holds something that is not the id of a record.")
        return ids


def totals(store: Store) -> dict[str, Any]:
    stats = store.stats()
    return {
        "changes": store.changes(),
        "records": stats.records,
        "bytes": stats.bytes,
        "size_limit": stats.size_limit,
        "hits": stats.hits,
        "seconds_saved": stats.seconds_saved,
    }


def stores(asked: Asked) -> dict[str, Any]:
    """The user's own store first, then those that nodes of runs have named."""
    own = set_by(asked.user)
    others = [c for key, c in used_by(asked.user).items() if key != key_of(own.folder)]
    named = [{"store": key_of(c.folder), "name": c.folder.name} for c in others]
    return {"stores": [{"store": key_of(own.folder), "name": ""}, *named]}


def records(asked: Asked) -> dict[str, Any]:
    search = asked.query.get("search", "")
    if len(search) > MOST_SEARCH:
        raise Bad(f"The search has {len(search)} characters: give {MOST_SEARCH} at most.")
    start, count = asked.number("start", 0, 10**9 - 1), asked.number("count", 50, MOST_CARDS)
    store = asked.store()
    sums = totals(store)  # first: what changes meanwhile is found by the next look
    cards = store.cards(search, start, count + 1)
    shown = [card.as_dict() for card in cards[:count]]
    return {**sums, "cards": shown, "more": len(cards) > count}


def changes(asked: Asked) -> dict[str, Any]:
    return {"changes": asked.store().changes()}


def preview(asked: Asked) -> web.Response:
    if not is_record_id(asked.named["id"]):
        raise Bad("This is not the id of a record.")
    frames = asked.store().preview(asked.named["id"])
    if frames is None:
        return web.Response(status=404)
    headers = {"Cache-Control": KEEP, "X-Content-Type-Options": "nosniff"}
    return web.Response(body=animated(frames), content_type="image/webp", headers=headers)


def animated(frames: np.ndarray) -> bytes:
    """Frames uint8 [f, h, w, 3] as one looping picture."""
    first, *others = [Image.fromarray(frame) for frame in frames]
    held = io.BytesIO()
    options = {"save_all": True, "append_images": others, "duration": FRAME, "loop": 0}
    first.save(held, "WEBP", quality=80, method=2, **(options if others else {}))
    return held.getvalue()


def report(asked: Asked) -> dict[str, Any]:
    found = live.shown(asked.named["id"], asked.user)
    if found is None:
        raise web.HTTPNotFound
    return found.as_dict()


def hello(asked: Asked) -> dict[str, Any]:
    users.introduce(asked.body.get("client", ""), asked.user)
    return {}


def pin(asked: Asked) -> dict[str, Any]:
    pinned = asked.body.get("pinned")
    if not isinstance(pinned, bool):
        raise Bad("'pinned' has to be true or false.")
    store = asked.store()
    done = (store.pin if pinned else store.unpin)(*asked.ids())
    return {**totals(store), "done": done}


def delete(asked: Asked) -> dict[str, Any]:
    store = asked.store()
    gone = sum(map(store.delete, asked.ids()))
    return {**totals(store), "deleted": gone}


def clear(asked: Asked) -> dict[str, Any]:
    """Delete everything; the number of records shown to the person who confirms goes along, so
    that what they have not seen is not deleted with it."""
    store = asked.store()
    held, confirmed = store.stats().records, asked.body.get("confirm")
    if type(confirmed) is not int or confirmed != held:
        raise Bad(f"The store holds {held} records: confirm that number to delete them all.")
    store.clear()
    return totals(store)


GET: dict[str, Callable[[Asked], Any]] = {
    "stores": stores,
    "records": records,
    "changes": changes,
    "totals": lambda asked: totals(asked.store()),
    "preview/{id}": preview,
    "runs/{id}": report,
}
POST: dict[str, Callable[[Asked], Any]] = {
    "hello": hello,
    "pin": pin,
    "delete": delete,
    "clear": clear,
}


async def read(request: web.Request) -> Asked:
    """A request as far as it can be read; Bad, HTTPException."""
    if request.headers.get("Sec-Fetch-Site") == "cross-site":  # older hosts look at Origin alone
        raise web.HTTPForbidden
    try:
        user = users.of_request(request)
    except KeyError:
        raise web.HTTPUnauthorized from None
    body: Any = {}
    if request.method == "POST":
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType
        if (request.content_length or 0) > MOST_BODY:
            raise web.HTTPRequestEntityTooLarge(MOST_BODY, request.content_length or 0)
        try:
            body = json.loads((await request.read())[: MOST_BODY + 1])
        except (ValueError, RecursionError):
            raise Bad("The body is not JSON.") from None
        if not isinstance(body, dict):
            raise Bad("The body has to be a JSON object.")
    return Asked(user, dict(request.query), dict(request.match_info), body)


def answering(work: Callable[[Asked], Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    @functools.wraps(work)
    async def answer(request: web.Request) -> web.Response:
        try:
            asked, loop = await read(request), asyncio.get_running_loop()
            found = await loop.run_in_executor(_threads, work, asked)
        except StoreError as error:  # before ValueError, which it is
            return web.json_response({"error": str(error)}, status=503)
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        if isinstance(found, web.Response):
            return found
        return web.json_response(found, headers={"Cache-Control": "no-store"})

    return answer


def register() -> None:
    """Add the routes to the host's server, if there is one."""
    server = users.server()
    if server is None:
        return
    for name, work in GET.items():
        server.routes.get(f"/carnator/{name}")(answering(work))
    for name, work in POST.items():
        server.routes.post(f"/carnator/{name}")(answering(work))
