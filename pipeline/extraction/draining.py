"""Copying outputs that have reached the host into memory of ours, by several threads where the process has the cores.

NumPy copies without holding the GIL, so threads copy at once; one thread moves less than a host's memory could.
"""

import concurrent.futures
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from pipeline.core.cores import num_cores
from pipeline.planning.host_memory import MAX_COPY_THREADS

_CORES_PER_THREAD = 8  # the others read, tokenise, encode and write
_PIECE_BYTES = 4 << 20  # what a thread copies at a time; it hides what handing it over costs


def num_copy_threads() -> int:
    """From the cores of this process: 1 below 16, and 8 from 64 on."""
    return max(1, min(MAX_COPY_THREADS, num_cores() // _CORES_PER_THREAD))


class CopyThreads:
    """Copies arrays. One caller at a time; with one thread, the caller's own copies."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "copy") if count > 1 else None
        self._copies: list[Future[None]] = []

    def start(self, target: np.ndarray, values: np.ndarray) -> None:
        """Starts copying; `values` are held no longer than that takes. Both have the same shape."""
        if self._pool is None:
            np.copyto(target, values)
            return
        if target.shape != values.shape:  # pieces of another number of rows could be broadcast
            raise ValueError(f"values of shape {values.shape} do not fit into memory of shape {target.shape}")
        rows = max(1, len(values) * _PIECE_BYTES // max(1, values.nbytes))
        for first in range(0, len(values), rows):
            piece = slice(first, first + rows)
            self._copies.append(self._pool.submit(np.copyto, target[piece], values[piece]))

    def finish(self) -> None:
        """Waits until nothing is copied any more. Raises what the first copy that failed has raised."""
        copies, self._copies = self._copies, []
        concurrent.futures.wait(copies)
        for copy in copies:
            copy.result()
