"""The number of CPU cores that this process may use."""

import os


def num_cores() -> int:
    """The cores of this process's CPU affinity; where that is not known, the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
