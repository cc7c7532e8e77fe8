"""The C library's allocator, told to keep what is freed: buffers of the same sizes are wanted again at once."""

import ctypes
import os
import sys

_LARGEST = 2**31 - 1
_SETTINGS = {  # of glibc's mallopt(3): the number of each parameter and the value it gets
    "MALLOC_MMAP_THRESHOLD_": (-3, _LARGEST),
    "MALLOC_TRIM_THRESHOLD_": (-1, _LARGEST),
    "MALLOC_ARENA_MAX": (-8, 1),
}


def keep_freed_memory() -> None:
    """For this process, from now on; what the environment sets stays. Does nothing without glibc.

    By itself glibc gives a step's temporary buffers back to the system after each step, which then clears them page by
    page, or does not, by the chance of their order; and each of its arenas keeps free memory that no other thread
    gets. A step of GPT-2's shape, 8 rows of 256: 17,000 page faults -> 0. The figures are in docs/performance.md.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    for variable, (parameter, value) in _SETTINGS.items():
        if variable not in os.environ:
            mallopt(parameter, value)
