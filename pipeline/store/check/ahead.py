"""Calls in a pool of threads, of which few are ahead of what their results are used for."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def map_ahead(call: Callable[[A], B], items: Iterable[A], threads: int) -> Iterator[B]:
    """`call(item)` of each item, in order, by several threads. Unlike `Executor.map`, at most `2 * threads` results
    wait."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="verify")
    under_way: deque[Future[B]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(call, item))
            if len(under_way) > 2 * threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:  # without waiting: an iterator that is dropped may be collected in one of the threads
        pool.shutdown(wait=False, cancel_futures=True)
