"""Make the index agree with the payload files: after damage, and after a process that died.

All of this is for the holder of the writer's lock: no file here is one in the making.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from .brief import brief_of, pack_brief
from .database import WRITING, SafeCache, request_tag
from .disk import UnsafeRow, open_plain
from .errors import RecordError
from .folder import write_whole
from .header import read_header
from .record import Entry, is_record_id, pack_entry
from .schema import payload_files_on_disk

log = logging.getLogger("carnator")

PINS_FILE = "pins.json"
PINS_LIMIT = 1 << 22  # bytes
CLAIMS_KEPT = 50_000


def reveal(cache: SafeCache, entry: Entry) -> None:
    """Make a record whose payload is on disk visible. Within a ``change``."""
    brief = pack_brief(brief_of(entry))
    cache.set(f"entry:{entry.id}", pack_entry(entry), tag=entry.partition)
    tag = request_tag(entry.partition, entry.identity)
    cache.set(f"brief:{entry.partition}:{entry.id}", brief, tag=tag)
    cache.settle(entry.id)


def finish(cache: SafeCache, root: Path) -> int:
    """Complete what a process that died had begun: deletions, and records wholly written. Returns
    how many records became visible."""
    found = 0
    for record_id, state, name in cache.unfinished():
        found += state == WRITING and _adopt(cache, root, name, f"record:{record_id}")
    # What could not be adopted is marked as gone by now.
    cache.forget(record_id for record_id, _, _ in cache.unfinished())
    return found


def rebuild(cache: SafeCache, root: Path) -> int:
    """Index each whole payload file that is not visible, delete what is no whole record, and drop
    rows without a file. Headers and sizes are checked here, tensors when they are read. Returns
    how many records were adopted. Raises what the database raises."""
    found = finish(cache, root)
    visible = set(cache.ids())
    keys = cache.payload_files()
    names = set(payload_files_on_disk(root))
    for name in sorted(names):
        key = keys.get(name)
        if key is None or key.removeprefix("record:") not in visible:
            found += _adopt(cache, root, name, key)
    _drop_lone_rows(cache, names)
    cache.trim("claim", CLAIMS_KEPT)
    cache.count_bytes()
    return found


def _adopt(cache: SafeCache, root: Path, name: str, key: str | None) -> bool:
    """Make the record in a payload file visible, or delete the file; ``key``: of its row."""
    try:
        with cache.open_payload(name) as stream:
            header = read_header(stream)
        header.check_spans()
        entry = header.entry
        if key is not None and key != f"record:{entry.id}":
            raise RecordError(f"its row calls it {key!r:.50}")
        with cache.change():
            if key is None and not cache.adopt(entry.id, name, brief_of(entry).nbytes):
                raise RecordError(f"record {entry.id} has another file")
            reveal(cache, entry)
        return True
    except (RecordError, UnicodeError, UnsafeRow) as error:
        log.warning("Store %s: dropped the file %s: %s.", root, name, error)
    except FileNotFoundError:
        pass  # it was never begun
    except OSError as error:
        log.warning("Store %s: the file %s cannot be read now: %s.", root, name, error)
        return False
    if key is None:
        cache.remove_file(name)
    else:
        with cache.change():
            cache.hide([key.removeprefix("record:")])
    return False


def _drop_lone_rows(cache: SafeCache, names: set[str]) -> None:
    """Drop records whose file is gone, and rows that belong to no record."""
    files = {key.removeprefix("record:"): name for name, key in cache.payload_files().items()}
    visible = set(cache.ids())
    lost = [i for i in visible if files.get(i) not in names]
    if lost:
        log.warning("Store: the payload files of %d records are gone; dropped those.", len(lost))
    hidden = {i for i in files if i not in visible}
    with cache.change(records=bool(lost)):
        cache.hide([*lost, *hidden])
        visible.difference_update(lost)
        briefed = set()
        for name in cache.names("brief"):
            partition, _, record_id = name.rpartition(":")
            if record_id in visible:
                briefed.add(record_id)
            else:
                del cache[f"brief:{partition}:{record_id}"]
        for kind in ("use", "pin"):
            for record_id in cache.names(kind):
                if record_id not in visible:
                    del cache[f"{kind}:{record_id}"]
    cache.forget([*lost, *hidden])


def save_pins(cache: SafeCache, root: Path, *more: str) -> None:
    """Keep the pins beside the index as well: they cannot be found again in the payload files.
    ``more``: ids of records about to be pinned."""
    pins = sorted({*cache.names("pin"), *more})
    write_whole(root / PINS_FILE, json.dumps(pins).encode("ascii"))


def restore_pins(cache: SafeCache, root: Path) -> None:
    """Pin the records that were pinned before the index was lost."""
    try:
        with open_plain(root / PINS_FILE) as stream:
            pins = json.loads(stream.read(PINS_LIMIT).decode("ascii"))
    except (OSError, UnsafeRow, ValueError, RecursionError):
        return
    with cache.change(records=False):
        for record_id in pins if isinstance(pins, list) else []:
            if is_record_id(record_id) and cache.small(f"entry:{record_id}") is not None:
                cache.set(f"pin:{record_id}", b"1")
