"""Make the index agree with the payload files: after damage, and after a process that died."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from .database import SafeCache
from .errors import RecordError
from .payload import read_header
from .record import pack_entry

log = logging.getLogger("carnator")


def adopt_files(cache: SafeCache, root: Path, names: list[str], min_age: float) -> int:
    """Index each payload file in ``names`` that is not visible; delete what is no whole record.

    Headers and sizes are checked here, tensors when they are read. ``min_age``: seconds since a
    file was last written below which it is left alone, as another process may be about to commit
    it. Returns how many records were adopted. Raises what the database raises.
    """
    if not names:
        return 0
    keys = cache.payload_files()
    visible = {f"record:{record_id}" for record_id in cache.ids()}
    adopted = 0
    for name in names:
        key = keys.get(name)
        if key in visible:
            continue
        path = root / name
        try:
            # abs: after the clock was set back, a file "from the future" must not stay for ever.
            if abs(time.time() - path.stat().st_mtime) < min_age:
                continue
            with open(path, "rb") as stream:
                entry = read_header(stream).entry
            row = pack_entry(entry)
            if key is None and not cache.adopt(f"record:{entry.id}", name, entry.nbytes):
                raise RecordError(f"record {entry.id} has another file")
            if key is not None and key != f"record:{entry.id}":
                raise RecordError(f"its row calls it {key!r:.50}")
        except (RecordError, UnicodeError) as error:
            log.warning("Store %s: dropped the file %s: %s.", root, name, error)
            if key is not None:
                cache.delete(key)
            cache.remove_file(name)
            continue
        except OSError:
            continue
        cache.set(f"entry:{entry.id}", row, tag=entry.partition)
        adopted += 1
    return adopted
