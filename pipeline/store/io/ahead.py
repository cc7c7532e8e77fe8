"""A map over a pool of threads that starts only a limited number of calls ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def map_ahead(call: Callable[[A], B], items: Iterable[A], threads: int) -> Iterator[B]:
    """The results of `call(item)`, in order, computed by several threads. Unlike `Executor.map`, it starts at most
    `2 * threads` calls ahead."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="ahead")
    started: deque[Future[B]] = deque()
    try:
        for item in items:
            started.append(pool.submit(call, item))
            if len(started) > 2 * threads:
                yield started.popleft().result()
        while started:
            yield started.popleft().result()
    finally:  # without waiting, since a dropped iterator may be garbage-collected in one of the threads
        pool.shutdown(wait=False, cancel_futures=True)
