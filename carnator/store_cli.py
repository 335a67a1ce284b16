"""``python -m carnator store``: a store looked at and cared for from the command line.

Torch is imported inside the commands, so that ``--help`` and mistyped options answer at once.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .store import Card, Store

MIB = 2**20
SHORTEST_ID = 4  # characters of an id that may stand for the whole
Command = Callable[["Store", argparse.Namespace], "int | None"]


def add_store_command(commands: Any) -> None:
    """Add ``store`` and its actions to the subparsers of the command line."""
    store = commands.add_parser("store", help="look at a store, keep records, let others go")
    actions = store.add_subparsers(required=True, metavar="ACTION", dest="action")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--store",
        type=Path,
        required=True,
        help="folder of the store; in ComfyUI's user folder it is __carnator/store",
    )
    shared.add_argument("--namespace", default="", help="whose records, on a multi-user server")
    shared.add_argument("--json", action="store_true", help="print JSON")

    def add(name: str, run: Command, what: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(name, help=what, parents=[shared])
        parser.set_defaults(command=run_store, run=run)
        return parser

    add("stat", stat, "totals")
    listing = add("list", list_records, "the records, newest first")
    listing.add_argument("--search", default="", help="only those with all of these words")
    listing.add_argument("--count", type=_whole, help="at most so many")
    add("verify", verify, "read every record whole; damaged ones are dropped")
    add("rebuild", rebuild, "make the index agree with the files")
    for name, run, what in (
        ("pin", pin, "never evict these records"),
        ("unpin", unpin, "let these records be evicted again"),
        ("delete", delete, "delete these records"),
    ):
        add(name, run, what).add_argument("ids", nargs="+", metavar="ID", help="or its beginning")
    add("clear", clear, "delete everything").add_argument("--yes", action="store_true")
    export = add("export", export_records, "write records to one new file")
    export.add_argument("file", type=Path)
    export.add_argument("ids", nargs="*", metavar="ID", help="or its beginning (default: all)")
    add("import", import_records, "take in an exported file").add_argument("file", type=Path)
    pruning = add("prune", prune, "evict what saves least until the rest fits")
    pruning.add_argument("--size", type=_whole, metavar="MIB", help="default: the store's limit")
    pruning.add_argument(
        "--other-formats", action="store_true", help="also delete stores of other versions here"
    )


def run_store(options: argparse.Namespace) -> int | None:
    """Open the store that the options name and do what they ask; returns the exit status."""
    from .store import RecordError, Store
    from .store.folder import SUBFOLDER, resolve

    folder = resolve(options.store, options.namespace)
    if options.action != "import" and not (folder / SUBFOLDER).is_dir():
        raise ValueError(f"There is no store at {folder}: give the folder of a store.")
    with Store(options.store, namespace=options.namespace) as store:
        try:
            run: Command = options.run
            return run(store, options)
        except RecordError as error:
            raise ValueError(str(error)) from None


def stat(store: Store, options: argparse.Namespace) -> None:
    from .store.folder import other_formats

    stats, cards = store.stats(), store.cards()
    others = other_formats(store.folder)
    data = {
        "folder": str(stats.folder),
        "records": stats.records,
        "pinned": sum(card.pinned for card in cards),
        "bytes": stats.bytes,
        "size_limit": stats.size_limit,
        "hits": stats.hits,
        "seconds_saved": round(stats.seconds_saved, 3),
        "disk_free": shutil.disk_usage(stats.folder).free,
        "other_formats": [path.name for path in others],
    }
    text = (
        f"{stats.folder}: {stats.records} records ({data['pinned']} pinned), "
        f"{stats.bytes / MIB:.1f} of {stats.size_limit / MIB:.0f} MiB, {stats.hits} hits, "
        f"{stats.seconds_saved:.1f} seconds saved"
    )
    if others:
        text += f"\nAlso here, of other versions: {', '.join(path.name for path in others)}"
    _tell(options, data, text)


def list_records(store: Store, options: argparse.Namespace) -> None:
    cards = store.cards(options.search, count=options.count)
    lines = [_line(card) for card in cards]
    _tell(options, [card.as_dict() for card in cards], "\n".join(lines) or "No records.")


def verify(store: Store, options: argparse.Namespace) -> int:
    found = dict(store.verify())
    bad = {record_id: reason for record_id, reason in found.items() if reason}
    lines = [*bad.values(), f"{len(found)} records read, {len(bad)} of them dropped."]
    _tell(options, {"read": len(found), "dropped": bad}, "\n".join(lines))
    return 1 if bad else 0


def rebuild(store: Store, options: argparse.Namespace) -> None:
    found = store.rebuild()
    _tell(options, {"found": found}, f"{found} records found again.")


def pin(store: Store, options: argparse.Namespace) -> None:
    count = store.pin(*_chosen(store, options.ids))
    _tell(options, {"pinned": count}, f"{count} records are pinned.")


def unpin(store: Store, options: argparse.Namespace) -> None:
    count = store.unpin(*_chosen(store, options.ids))
    _tell(options, {"unpinned": count}, f"{count} records are no longer pinned.")


def delete(store: Store, options: argparse.Namespace) -> None:
    count = sum(store.delete(record_id) for record_id in _chosen(store, options.ids))
    _tell(options, {"deleted": count}, f"{count} records deleted.")


def clear(store: Store, options: argparse.Namespace) -> None:
    count = store.stats().records
    if not options.yes:
        raise ValueError(f"This deletes all {count} records, pinned ones too: add --yes.")
    store.clear()
    _tell(options, {"deleted": count}, f"{count} records deleted.")


def export_records(store: Store, options: argparse.Namespace) -> None:
    count = store.export(options.file, _chosen(store, options.ids) if options.ids else None)
    _tell(options, {"exported": count}, f"{count} records written to {options.file}.")


def import_records(store: Store, options: argparse.Namespace) -> None:
    done = store.import_file(options.file)
    text = (
        f"{done.taken} records taken in, {done.known} left out as they are here already, "
        f"{done.refused} refused."
    )
    _tell(options, {"taken": done.taken, "known": done.known, "refused": done.refused}, text)


def prune(store: Store, options: argparse.Namespace) -> None:
    from .store.folder import other_formats

    count = store.prune(None if options.size is None else options.size * MIB)
    others = other_formats(store.folder) if options.other_formats else []
    for path in others:
        shutil.rmtree(path)
    text = "".join([f"{count} records evicted.", *(f" {path.name} deleted." for path in others)])
    _tell(options, {"evicted": count, "deleted": [path.name for path in others]}, text)


def _tell(options: argparse.Namespace, data: Any, text: str) -> None:
    print(json.dumps(data, indent=2) if options.json else text)


def _line(card: Card) -> str:
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(card.created))
    return (
        f"{card.id}  {made}  {card.nbytes / MIB:8.2f} MiB  {card.hits:4d} hits "
        f"{card.seconds_saved:9.1f} s saved {'pinned' if card.pinned else '      '}  {card.label}"
    )


def _chosen(store: Store, names: list[str]) -> list[str]:
    """The records that ids, or their beginnings, stand for."""
    ids = [entry.id for entry in store.entries()]
    chosen = []
    for name in names:
        found = [record_id for record_id in ids if record_id.startswith(name)]
        if not re.fullmatch(f"[0-9a-f]{{{SHORTEST_ID},32}}", name) or len(found) != 1:
            why = "no record" if not found else f"{len(found)} records"
            raise ValueError(
                f"{name!r} stands for {why}: give {SHORTEST_ID} or more characters of one id, as "
                "'store list' shows them."
            )
        chosen += found
    return chosen


def _whole(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
