"""Cores and memory of the host and its devices."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

_ALIGNMENT = 64  # bytes: XLA takes a numpy array's memory as it is when it begins at a multiple of this


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """`np.empty`, beginning where JAX's CPU backend can use the memory without a copy."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT - 1, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def device_memory(device: Any) -> int | None:
    """The bytes of a JAX device that programs may use; None if JAX does not report them: for CPUs, and for devices of
    other machines."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except RuntimeError:  # JAX's error for devices that are not here
        return None


def host_memory() -> int:
    """The memory of this host in bytes, or the limit of its container if that is lower."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:  # no container, or one without cgroup v2
        return memory
    return min(memory, int(limit)) if limit.isdecimal() else memory


def num_cores() -> int:
    """The cores of this process's CPU affinity; where that is not known, the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
