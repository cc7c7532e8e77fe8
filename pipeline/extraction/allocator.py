"""The C library's allocator, told to keep what is freed, since buffers of the same sizes are wanted again at once, and
to lie on huge pages. It gives free memory back where a job has more than it plans."""

import ctypes
import mmap
import os
import resource
import sys
from pathlib import Path

from pipeline.core.cores import num_cores

MOST_CORES = 8
_SPARE = 32 << 20  # bytes: text that is read ahead, and holes that are not worth giving back
_SETTINGS = {  # numbers and values of glibc's mallopt(3)
    "M_ARENA_MAX": (-8, 1),
    "M_MMAP_MAX": (-4, 0),
    "M_TRIM_THRESHOLD": (-1, -1),  # never by itself
}
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_keeps_freed_memory = False  # in this process


def keep_freed_memory() -> None:
    """For this process, from now on, on glibc and at most `MOST_CORES` cores: with more, threads would wait for each
    other at one arena's lock, and their devices' memory is rarely the host's. Whoever sets anything of the allocator
    in the environment is left alone.

    By itself glibc gives a step's temporary buffers back to the system after each step, which then clears them page by
    page (GPT-2's shape, 8 rows of 256: 17,000 page faults a step, and none with this), and each of its arenas keeps
    free memory that no other thread gets. Call it before what starts threads is imported: their arenas stay.
    """
    is_set = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )
    if is_set or not sys.platform.startswith("linux") or num_cores() > MOST_CORES:
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # another C library
        return
    for parameter, value in _SETTINGS.values():
        libc.mallopt(parameter, value)
    global _keeps_freed_memory
    _keeps_freed_memory = True
    if _reserving_is_free():
        _ask_for_huge_pages(libc)


def _reserving_is_free() -> bool:
    """Whether memory that is never touched is taken from nobody: no limit counts it."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    is_counted = _OVERCOMMIT.exists() and _OVERCOMMIT.read_text().strip() == "2"
    return not is_counted and all(limit == resource.RLIM_INFINITY for limit in limits)


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """For as much of the heap as half of the machine's memory, which is reserved, and at once free again. Matrix
    products then miss fewer translations of addresses (docs/performance.md).

    The advice stays with the heap until that is given back, which the settings above leave to `give_back_free_memory`.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = os.sysconf("SC_PHYS_PAGES") // 2 * mmap.PAGESIZE
    address = libc.malloc(size)
    if address is None:
        return
    until_page = -address % mmap.PAGESIZE
    libc.madvise(address + until_page, size - mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    libc.free(address)


class HeapTrimmer:
    """Gives what is free in the heap back to the system where a job has taken more memory than it plans to.

    Only after `keep_freed_memory`, by which nothing is given back otherwise: what is small and lasts is put into the
    place that something large has left, which then is too small for the next large one, and so the heap would grow to
    more than is ever used at once. Each time twice as much more than planned is let be, so that it stays at a few.
    """

    def __init__(self, planned_bytes: int, step_bytes: int) -> None:
        """`planned_bytes` will be taken from now on, `step_bytes` of them by each step anew."""
        self._step_bytes = step_bytes
        self._spare = _SPARE
        self._limit = give_back_free_memory() + planned_bytes + self._spare if _keeps_freed_memory else None

    def before_step(self) -> None:
        if self._limit is not None and heap_bytes() > self._limit:
            self._spare *= 2
            self._limit = max(self._limit, give_back_free_memory() + self._step_bytes + self._spare)


def give_back_free_memory() -> int:
    """What `heap_bytes` says then. On Linux with glibc; takes 5 to 25 ms, and pages that are used again are cleared."""
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    if _keeps_freed_memory and _reserving_is_free():
        _ask_for_huge_pages(libc)  # what lay above all that is used is gone, and the advice with it
    return heap_bytes()


def heap_bytes() -> int:
    """The memory of this process, on Linux, that is in no file."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE
