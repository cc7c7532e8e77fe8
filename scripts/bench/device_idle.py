"""Prints the share of a trace's time in which each device was idle.

    python scripts/bench/device_idle.py DIRECTORY     # the directory of run.profile

The share is of the time from a device's first to its last event in the trace. A TPU or GPU is busy while one of its
operations runs, the CPU backend while any program runs.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from jax.profiler import ProfileData

_HOST_THREADS = "tf_XLA"  # threads of the CPU backend; they compute, or wait for threads that compute
_HOST_EVENT = "ThunkExecutor::Execute"


def idle_fraction(intervals: Iterable[tuple[float, float]]) -> float:
    """1 - (length of the union of the intervals) / (from the first start to the last end)."""
    ordered = sorted(intervals)
    busy, reached = 0.0, ordered[0][0]
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return 1 - busy / (reached - ordered[0][0])


def device_idle(directory: Path) -> dict[str, float]:
    """The idle fraction of each device of every process with a trace below `directory`, by name."""
    by_plane: dict[str, list[tuple[float, float]]] = {}
    for file in sorted(directory.rglob("*.xplane.pb")):
        for plane in ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                if plane.name.startswith("/device:"):
                    events = line.events if line.name == "XLA Ops" else ()
                else:
                    is_backend = line.name.startswith(_HOST_THREADS)
                    events = [e for e in line.events if e.name.startswith(_HOST_EVENT)] if is_backend else ()
                intervals = [(event.start_ns, event.start_ns + event.duration_ns) for event in events]
                if intervals:
                    by_plane.setdefault(f"{file.relative_to(directory).parts[0]} {plane.name}", []).extend(intervals)
    return {name: idle_fraction(intervals) for name, intervals in by_plane.items()}


if __name__ == "__main__":
    fractions = device_idle(Path(sys.argv[1]))
    if not fractions:
        sys.exit(f"no device activity in the traces below {sys.argv[1]}")
    for device, idle in fractions.items():
        print(f"{device}: idle {idle:.2%} of the time")
