"""Records of finished dense runs: kept on disk, found by partition, read in part."""

from .cards import Card
from .errors import RecordError, StoreError
from .preview import PREVIEW, make_preview
from .record import Draft, Entry
from .shelf import Shelf
from .store import Store, StoreStats
from .transfer import Imported

__all__ = [
    "PREVIEW",
    "Card",
    "Draft",
    "Entry",
    "Imported",
    "RecordError",
    "Shelf",
    "Store",
    "StoreError",
    "StoreStats",
    "make_preview",
]
