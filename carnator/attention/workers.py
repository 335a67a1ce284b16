"""Worker threads that each run torch on one core.

Block-sparse attention in plain torch is many small operations. Split over cores one by one, each
waits for all cores at its end, and on a busy machine that costs more than the work. So the
*blocks* are dealt to threads instead, and each thread computes alone: it sets its own number of
intra-operation threads to one, which torch keeps per thread where it was built with OpenMP.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

MOST = 64


def worker_count() -> int:
    """Threads that ``spread`` may use for the calling thread: as many as torch gives it."""
    return min(torch.get_num_threads(), MOST) if _per_thread() else 1


def dealt(items: Iterable[int]) -> Callable[[], Iterator[int]]:
    """A hand of cards: every iterator takes from the same items until none is left."""
    cards = deque(items)

    def hand() -> Iterator[int]:
        while True:
            try:
                yield cards.popleft()
            except IndexError:
                return

    return hand


def spread(work: Callable[[int], None], workers: int) -> None:
    """Run ``work(slot)`` for slots 0 to workers - 1, all at once; an error is raised here."""
    if workers == 1:
        work(0)
        return
    inference = torch.is_inference_mode_enabled()

    def run(slot: int) -> None:
        # Torch hands neither mode down to other threads.
        with torch.inference_mode(inference), torch.no_grad():
            work(slot)

    running = [_pool(workers).submit(run, slot) for slot in range(workers)]
    errors = [error for future in running if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


@functools.cache
def _per_thread() -> bool:
    return "parallel backend: OpenMP" in torch.__config__.parallel_info()


_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def _pool(workers: int) -> ThreadPoolExecutor:
    with _lock:
        if workers not in _pools:
            _pools[workers] = _started(workers)
        return _pools[workers]


def _started(workers: int) -> ThreadPoolExecutor:
    threads = torch.get_num_threads()
    all_here = threading.Barrier(workers)

    def begin() -> None:
        torch.set_num_threads(1)
        # A thread takes over the number set last by anyone when it first asks for it: now, then.
        torch.get_num_threads()
        all_here.wait(timeout=60)

    pool = ThreadPoolExecutor(workers, "carnator-attention", initializer=begin)
    for future in [pool.submit(_nothing) for _ in range(workers)]:
        future.result()
    # Threads that anyone starts later take over the number set last; the caller's own number
    # never changed.
    torch.set_num_threads(threads)
    return pool


def _nothing() -> None: ...
