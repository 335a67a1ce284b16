"""Where a store lives on disk."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

from .errors import StoreError
from .record import FORMAT

# A folder of our own inside the one the user names: everything in it may be deleted when it is
# bad, nobody else's files can be, and another format version finds its own.
SUBFOLDER = f"carnator-v{FORMAT}"
NAMESPACE = re.compile(r"[0-9A-Za-z_-]{1,128}")


def resolve(folder: Path | str, namespace: str = "") -> Path:
    """The absolute path of the folder a user named, or of a name space inside it.

    A name space (the id of a user of a shared server, say) has records, limits and totals of its
    own. StoreError if the folder or the name space cannot be one.
    """
    text = os.fspath(folder) if isinstance(folder, (str, Path)) else ""
    if not text.strip() or "\0" in text:
        raise StoreError(f"The store folder is {folder!r}; name a folder.")
    try:
        path = Path(text).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise StoreError(f"The store folder {text!r} cannot be found: {error}.") from error
    if os.path.expandvars(path) != str(path):  # diskcache would expand it and go elsewhere
        raise StoreError(f"The store folder {text!r} holds a variable; write the path out.")
    if namespace == "":
        return path
    if not isinstance(namespace, str) or not NAMESPACE.fullmatch(namespace):
        raise StoreError(
            f"The store's name space is {namespace!r:.150}; use 1 to 128 letters, digits, '-' "
            "and '_'."
        )
    # Some file systems do not tell "Ann" from "ann"; the hash does.
    tail = hashlib.blake2b(namespace.encode("ascii"), digest_size=6).hexdigest()
    return path / "users" / f"{namespace.lower()[:60]}-{tail}"


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


def other_formats(folder: Path) -> list[Path]:
    """Stores of other versions of the pack in the same folder; this one leaves them alone."""
    try:
        return sorted(
            path
            for path in folder.iterdir()
            if re.fullmatch(r"carnator-v\d{1,4}", path.name)
            and path.name != SUBFOLDER
            and path.is_dir()
            and not path.is_symlink()
        )
    except OSError:
        return []


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file of the store's own: whoever reads it finds the old or the new content. For
    one writer at a time. OSError."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # left by a crash, or a planted link
    with open(new, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, path)
