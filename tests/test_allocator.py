"""What a job has freed stays with its process, and is used again without page faults."""

import os
import platform
import subprocess
import sys

import pytest

from pipeline.allocator import MOST_CORES

PROGRAM = """
import resource, runpy, sys, threading

sys.argv = ["pipeline.run", "--help"]
try:
    runpy.run_module("pipeline.run", run_name={name!r}, alter_sys=True)
except SystemExit:
    pass

def large():  # larger than the 64 MiB that glibc gives a thread's own heap
    b"x" * int(96 << 20)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def in_threads():
    for _ in range(4):
        thread = threading.Thread(target=large)
        thread.start()
        thread.join()

in_threads()
before = faults()
in_threads()
print(faults() - before)
"""
SET = ("MALLOC_", "GLIBC_TUNABLES")


def page_faults(name: str) -> int:
    """Of four threads with 96 MiB each, once `pipeline.run` has been run as the module `name`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(SET)}
    command = [sys.executable, "-c", PROGRAM.format(name=name)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or len(os.sched_getaffinity(0)) > MOST_CORES, reason="left alone there"
)
def test_the_command_uses_large_buffers_again_without_page_faults() -> None:
    kept, given_back = page_faults("__main__"), page_faults("imported")
    assert given_back > 20 * max(kept, 5), (kept, given_back)
