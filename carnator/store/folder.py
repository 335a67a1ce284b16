"""Where a store lives on disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import StoreError
from .record import FORMAT

# A folder of our own inside the one the user names: everything in it may be deleted when it is
# bad, nobody else's files can be, and another format version finds its own.
SUBFOLDER = f"carnator-v{FORMAT}"


def resolve(folder: Path | str) -> Path:
    """The absolute path of the folder a user named. StoreError if it cannot name one."""
    text = os.fspath(folder) if isinstance(folder, (str, Path)) else ""
    if not text.strip() or "\0" in text:
        raise StoreError(f"The store folder is {folder!r}; name a folder.")
    try:
        path = Path(text).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise StoreError(f"The store folder {text!r} cannot be found: {error}.") from error
    if os.path.expandvars(path) != str(path):  # diskcache would expand it and go elsewhere
        raise StoreError(f"The store folder {text!r} holds a variable; write the path out.")
    return path


def prepare(folder: Path) -> Path:
    """Make the store's own folder, readable by its user alone, and try to write there.

    Returns its path. StoreError with what to do if it cannot be written.
    """
    root = folder / SUBFOLDER
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name == "posix":
            root.chmod(0o700)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise StoreError(
            f"The store folder {str(folder)!r} cannot be written ({error.strerror or error}); "
            "choose another folder or make this one writable."
        ) from error
    return root
