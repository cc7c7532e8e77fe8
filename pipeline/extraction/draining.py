"""Copies outputs that have reached the host into our buffers, with several threads if the process has enough cores.

NumPy copies without holding the GIL, so threads copy in parallel. One thread does not saturate the memory bandwidth.
"""

import concurrent.futures
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from pipeline.core.cores import num_cores
from pipeline.planning.host_memory import MAX_COPY_THREADS

_CORES_PER_THREAD = 8  # the others read, tokenise, encode and write
_PIECE_BYTES = 4 << 20  # copied per task; large enough to hide the cost of a task


def num_copy_threads() -> int:
    """One thread per 8 cores of this process: 1 below 16 cores, at most 8."""
    return max(1, min(MAX_COPY_THREADS, num_cores() // _CORES_PER_THREAD))


class CopyThreads:
    """Copies arrays with `count` threads; with one, on the caller's thread. Only one thread may call it at a time."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "copy") if count > 1 else None
        self._copies: list[Future[None]] = []

    def start(self, target: np.ndarray, values: np.ndarray) -> None:
        """Starts copying `values` into `target`, then releases them. Raises ValueError if the shapes differ."""
        if self._pool is None:
            np.copyto(target, values)
            return
        if target.shape != values.shape:  # pieces with different numbers of rows could be broadcast
            raise ValueError(f"values of shape {values.shape} do not fit in memory of shape {target.shape}")
        rows = max(1, len(values) * _PIECE_BYTES // max(1, values.nbytes))
        for first in range(0, len(values), rows):
            piece = slice(first, first + rows)
            self._copies.append(self._pool.submit(np.copyto, target[piece], values[piece]))

    def finish(self) -> None:
        """Waits for all copies. Raises the error of the first copy that failed."""
        copies, self._copies = self._copies, []
        concurrent.futures.wait(copies)
        for copy in copies:
            copy.result()
