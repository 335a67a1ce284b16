"""One background thread that does a store's writing, in order, within a memory bound."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

log = logging.getLogger("carnator")

IDLE = 30.0  # seconds without work after which the thread ends (it starts again when needed)
EXIT_WAIT = 60.0  # seconds an interpreter that exits waits for pending writes


class Writer:
    """Runs jobs one after the other on a daemon thread. Jobs must not raise."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes that waiting jobs may hold in memory."""
        self._limit = limit
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._held = 0
        self._busy = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        _writers.add(self)

    def add(self, job: Callable[[], None], nbytes: int = 0, alone: bool = False) -> bool:
        """Queue a job; False if the waiting ones already hold too much memory, or any at all for
        one that must hold it ``alone``."""
        with self._changed:
            if self._held and (alone or self._held + nbytes > self._limit):
                return False
            self._jobs.append((job, nbytes))
            self._held += nbytes
            self._start()
            self._changed.notify_all()
            return True

    def discard(self) -> None:
        """Forget the jobs that have not begun."""
        with self._changed:
            self._held -= sum(nbytes for _, nbytes in self._jobs)
            self._jobs.clear()
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending; False if ``timeout`` (seconds) passed first."""
        if threading.current_thread() is self._thread:
            return False  # a job would wait for itself
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._jobs or self._busy:
                if self._jobs and not self._start():
                    break
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            else:
                return True
        # An interpreter that is shutting down starts no threads: do the work here.
        while self._step():
            pass
        return True

    def _start(self) -> bool:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="carnator-store", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._changed.wait(IDLE)
                if not self._jobs:
                    self._thread = None
                    return
            self._step()

    def _step(self) -> bool:
        """Do the next job, if there is one."""
        with self._changed:
            if not self._jobs:
                return False
            job, nbytes = self._jobs.popleft()
            self._busy = True
        try:
            job()
        except Exception:  # a faulty job must not end the thread
            log.exception("Store: a background job failed.")
        finally:
            del job  # frees the record before the next one is taken up
            with self._changed:
                self._held -= nbytes
                self._busy = False
                self._changed.notify_all()
        return True


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    for writer in list(_writers):
        writer.flush(EXIT_WAIT)
