"""Records of finished dense runs: kept on disk, found by partition, read in part."""

from .errors import RecordError, StoreError
from .record import Draft, Entry
from .store import Store, StoreStats

__all__ = ["Draft", "Entry", "RecordError", "Store", "StoreError", "StoreStats"]
