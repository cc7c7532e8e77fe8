"""What a job has freed stays with its process, and is used again without page faults; it lies on huge pages."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.allocator import has_few_cores

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
held = b"x" * (96 << 20)
rollup = open("/proc/self/smaps_rollup").read()
print(rollup.partition("AnonHugePages:")[2].split()[0])  # KiB
"""
SET = ("MALLOC_", "GLIBC_TUNABLES")


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def measured(name: str) -> tuple[int, int]:
    """Once `pipeline.run` has been run as the module `name`: page faults of four threads with 96 MiB each, and the MiB
    of huge pages of a process that holds 96 MiB."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(SET)}
    command = [sys.executable, "-c", PROGRAM.format(name=name)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    faults, huge_kib = map(int, done.stdout.splitlines()[-2:])
    return faults, huge_kib // 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not has_few_cores(), reason="left alone there")
def test_the_command_uses_large_buffers_again_without_page_faults_on_huge_pages() -> None:
    (kept, kept_huge), (given_back, given_back_huge) = measured("__main__"), measured("imported")
    assert given_back > 20 * max(kept, 5), (kept, given_back)
    if THP.exists() and "[madvise]" in THP.read_text():
        assert kept_huge > 90 > given_back_huge, (kept_huge, given_back_huge)
