"""Whose run or request this is, on a server with several users, and what that user has set.

A server started with ``--multi-user`` keeps its users apart: each has a name space in the store.
The host knows the user of a request, but not the one of a run; so each page says once which client
it is (``introduce``), and runs carry the client's id.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

import folder_paths
from comfy.cli_args import args

log = logging.getLogger("carnator")
ONLY = "default"  # the host's name of the one user of a server that has no others
CLIENTS = 4096  # pages remembered
CLIENT = re.compile(r"[0-9A-Za-z_-]{8,64}")
PLAIN = re.compile(r"[0-9A-Za-z_-]{1,128}")  # what the store takes as a name space

_clients: OrderedDict[str, str] = OrderedDict()
_lock = Lock()


def server() -> Any:
    """The host's server, or None in tests and scripts. It is not imported for that: it takes
    seconds, and wherever there is one it is there before the nodes are."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def of_request(request: Any) -> str:
    """The user behind a request; KeyError when the host knows no such user."""
    return server().user_manager.get_request_user_id(request)


def introduce(client: str, user: str) -> None:
    """A page of ``user`` says which client of the host it is. ValueError."""
    if not isinstance(client, str) or not CLIENT.fullmatch(client):
        raise ValueError("'client' is not the id of a client: send the one of the websocket.")
    with _lock:
        _clients[client] = user
        _clients.move_to_end(client)
        while len(_clients) > CLIENTS:
            _clients.popitem(last=False)


def of_run() -> str:
    """The user whose prompt is running; with several users, "" for a prompt of nobody's page."""
    if not args.multi_user:
        return ONLY
    with _lock:
        return _clients.get(str(getattr(server(), "client_id", "")), "")


def name_space(user: str) -> str:
    """The store's name space of a user: none on a server with one user, nor for nobody."""
    if not args.multi_user or not user:
        return ""
    return user if PLAIN.fullmatch(user) else hashlib.blake2b(user.encode()).hexdigest()[:64]


def setting(user: str, name: str) -> Any:
    """What a user has set in the editor's settings, or None. Untrusted: anything JSON can hold."""
    folder = folder_paths.get_public_user_directory(user) if user else None
    if folder is None:
        return None
    try:
        held = json.loads((Path(folder) / "comfy.settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return held.get(name) if isinstance(held, dict) else None
