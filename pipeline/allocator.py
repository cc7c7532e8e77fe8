"""The C library's allocator, told to keep what is freed: buffers of the same sizes are wanted again at once."""

import ctypes
import mmap
import os
import sys

MOST_CORES = 8
_SETTINGS = {  # numbers and values of glibc's mallopt(3)
    "M_ARENA_MAX": (-8, 1),
    "M_MMAP_MAX": (-4, 0),
    "M_TRIM_THRESHOLD": (-1, -1),  # never
}
_VARIABLES = {
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
}


def has_few_cores() -> bool:
    """Whether this process has at most `MOST_CORES`, so that what the host does takes time from devices that are it."""
    return _num_cores() <= MOST_CORES


def keep_freed_memory() -> None:
    """For this process, from now on, on glibc and few cores: with more, threads would wait for each other at one
    arena's lock, and their devices' memory is rarely the host's. What the environment sets stays.

    By itself glibc gives a step's temporary buffers back to the system after each step, which then clears them page by
    page (GPT-2's shape, 8 rows of 256: 17,000 page faults a step, and none with this), and each of its arenas keeps
    free memory that no other thread gets. Call it before what starts threads is imported: their arenas stay.
    """
    if not sys.platform.startswith("linux") or not has_few_cores():
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # another C library
        return
    if "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", "") and not _VARIABLES & os.environ.keys():
        for parameter, value in _SETTINGS.values():
            libc.mallopt(parameter, value)
    _ask_for_huge_pages(libc)


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """For the allocator's next memory, half of the machine's: reserved, and at once free again, which costs nothing
    until it is used. Matrix products then miss fewer translations of addresses (docs/performance.md).

    The heap keeps the advice only where it is not given back, so this comes after the settings.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = os.sysconf("SC_PHYS_PAGES") // 2 * mmap.PAGESIZE
    address = libc.malloc(size)
    if address is None:  # the user limits the address space, say
        return
    inside = address % mmap.PAGESIZE and mmap.PAGESIZE - address % mmap.PAGESIZE
    libc.madvise(address + inside, size - mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    libc.free(address)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
