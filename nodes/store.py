"""Carnator Store: where earlier generations are kept, and how big that may grow."""

from __future__ import annotations

import math
from pathlib import Path

import folder_paths
from comfy.cli_args import args
from comfy_api.latest import io

from ..carnator.store import Store
from . import users
from .places import StoreChoice

GIB = 2**30
DEFAULT_GIB = 8.0
SMALLEST_GIB, LARGEST_GIB = 0.01, 4096.0
FOLDER, SIZE = "Carnator.Store.Folder", "Carnator.Store.Size"  # the editor's settings
CarnatorStoreType = io.Custom("CARNATOR_STORE")


def default_folder() -> Path:
    """A folder of the user directory that the host does not serve over HTTP."""
    return Path(folder_paths.get_system_user_directory("carnator")) / "store"


def chosen_store(where: str = "", size_gb: float = DEFAULT_GIB) -> StoreChoice:
    """The store of a folder, relative ones inside the user directory; empty is the default."""
    folder = Path(where.strip()).expanduser() if where.strip() else default_folder()
    if not folder.is_absolute():
        folder = Path(folder_paths.get_user_directory()) / folder
    return StoreChoice(folder, int(size_gb * GIB))


class DefaultStore(StoreChoice):
    """The store of nodes that none is connected to: where, and as big as, the user whose prompt is
    running has set it in the editor. Asked for each run, since nodes are not run again for it."""

    def open(self) -> Store:
        user = users.of_run()
        return set_by(user).open_for(user)


def default_store() -> StoreChoice:
    plain = chosen_store()
    return DefaultStore(plain.folder, plain.size_limit)


def set_by(user: str) -> StoreChoice:
    """The store a user has set. With several users on a server the place is the server's alone;
    what is out of range counts as not set."""
    where, size = users.setting(user, FOLDER), users.setting(user, SIZE)
    if not isinstance(where, str) or args.multi_user:
        where = ""
    sized = type(size) in (int, float) and math.isfinite(size)
    if not sized or not SMALLEST_GIB <= size <= LARGEST_GIB:
        size = DEFAULT_GIB
    return chosen_store(where, size)


class CarnatorStore(io.ComfyNode):
    """Opens the store once, so that a folder that cannot be used is told here."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CarnatorStore",
            display_name="Carnator Store",
            category="Carnator",
            description="Chooses where earlier generations are kept for reuse and how much space "
            "they may take. When it is full, what saves least per byte goes first.",
            search_aliases=["cache folder", "records", "disk"],
            inputs=[
                io.String.Input(
                    "where",
                    default="",
                    tooltip="A folder on this machine. Empty: the user folder's own place. A "
                    "relative path is inside the user folder.",
                ),
                io.Float.Input(
                    "size_gb",
                    default=DEFAULT_GIB,
                    min=SMALLEST_GIB,
                    max=LARGEST_GIB,
                    step=0.5,
                    round=0.01,
                    tooltip="The most the records may take, in GiB.",
                ),
            ],
            outputs=[
                CarnatorStoreType.Output(
                    display_name="store", tooltip="Connect it to the other Carnator nodes."
                )
            ],
        )

    @classmethod
    def execute(cls, where: str, size_gb: float) -> io.NodeOutput:
        choice = chosen_store(where, size_gb)
        choice.open()  # raises with a sentence of its own when the folder cannot be written
        return io.NodeOutput(choice)
