"""The two errors a user of the store can meet."""

from __future__ import annotations


class StoreError(ValueError):
    """The store cannot be opened, or it refuses what it was given; the message says why."""


class RecordError(Exception):
    """A record is missing, damaged or not ours.

    A record found to be so has already been dropped, with one line in the log. Only a record
    that could not be read for a passing reason (too many open files, say) is left in place.
    """
