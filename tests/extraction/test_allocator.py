"""What a job has freed stays with its process, and is used again without page faults; it lies on huge pages."""

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.cores import num_cores
from pipeline.extraction.allocator import MOST_CORES
from tests.jobs import write_text

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
try:
    print(open("/proc/self/smaps_rollup").read().partition("AnonHugePages:")[2].split()[0])  # KiB
except OSError:
    print(0)
"""
SET = ("MALLOC_", "GLIBC_TUNABLES")


RESERVED = """
import resource, sys
from pathlib import Path
from pipeline.extraction.allocator import keep_freed_memory

if sys.argv[1:]:
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
keep_freed_memory()
print(Path("/proc/self/status").read_text().partition("VmSize:")[2].split()[0])  # KiB
"""
HOLES = """
import sys
from pipeline.extraction.allocator import HeapTrimmer, heap_bytes, keep_freed_memory

keep_freed_memory()
trimmer = HeapTrimmer(planned_bytes=int(sys.argv[1]) << 20, step_bytes=8 << 20)
both = [(b"x" * (8 << 20), b"y" * 5000) for _ in range(20)]
lasting = [small for _, small in both]
del both
before = heap_bytes()
trimmer.before_step()
print(round((before - heap_bytes()) / 2**20))
held = b"x" * (96 << 20)
print(open("/proc/self/smaps_rollup").read().partition("AnonHugePages:")[2].split()[0])  # KiB
"""
TIMES = """
import sys
from pipeline.extraction import allocator
from pipeline.extraction.allocator import HeapTrimmer, give_back_free_memory

if sys.argv[1:]:
    allocator.keep_freed_memory()
trims = []
allocator.give_back_free_memory = lambda: trims.append(None) or give_back_free_memory()
trimmer = HeapTrimmer(planned_bytes=0, step_bytes=0)
for step in range(100):
    trimmer.before_step()
    large = b"x" * (160 << 20)  # that nobody has planned
    del large
print(len(trims))
"""
JOB = """
import runpy, sys
from pipeline.extraction import allocator
from pipeline.extraction.allocator import give_back_free_memory

allocator._SPARE = -(1 << 40)  # each step then has more than is planned
times = []
allocator.give_back_free_memory = lambda: times.append(None) or give_back_free_memory()
sys.argv[0] = "pipeline.run"
try:
    runpy.run_module("pipeline.run", run_name="__main__", alter_sys=True)
except SystemExit as end:
    if end.code:
        raise
print(len(times))
"""
THP = Path("/sys/kernel/mm/transparent_hugepage")
ON_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or num_cores() > MOST_CORES, reason="left alone there")


def measured(name: str) -> tuple[int, int]:
    """Once `pipeline.run` has been run as the module `name`: page faults of four threads with 96 MiB each, and the MiB
    of huge pages of a process that holds 96 MiB."""
    faults, huge_kib = map(int, printed(PROGRAM.format(name=name))[-2:])
    return faults, huge_kib // 1024


def printed(program: str, *arguments: str) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(SET)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()


def huge_pages_are_to_be_had() -> bool:
    """By those who ask, at once."""
    return THP.exists() and all("[madvise]" in (THP / file).read_text() for file in ("enabled", "defrag"))


@ON_GLIBC
def test_the_command_uses_large_buffers_again_without_page_faults_on_huge_pages() -> None:
    (kept, kept_huge), (given_back, given_back_huge) = measured("__main__"), measured("imported")
    assert given_back > 20 * max(kept, 5), (kept, given_back)
    if huge_pages_are_to_be_had():
        assert kept_huge > given_back_huge + 20, (kept_huge, given_back_huge)


@ON_GLIBC
def test_memory_is_reserved_only_where_no_limit_counts_it():
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    if overcommit.exists() and overcommit.read_text().strip() == "2":
        pytest.skip("all memory is counted here")
    physical_kib = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE >> 10
    (free,), (limited,) = printed(RESERVED), printed(RESERVED, str(2 * physical_kib << 10))
    assert int(limited) + physical_kib // 4 < int(free)


@ON_GLIBC
def test_holes_are_given_back_where_more_is_resident_than_was_planned():
    given_back = {planned: printed(HOLES, planned) for planned in ("200", "80")}
    assert int(given_back["200"][0]) == 0
    assert int(given_back["80"][0]) >= 140  # of the 160 MiB
    if huge_pages_are_to_be_had():
        huge_kib = {planned: int(kib) for planned, (_, kib) in given_back.items()}
        assert min(huge_kib.values()) > 48 << 10, huge_kib  # also of what is allocated afterwards


@ON_GLIBC
def test_a_job_that_needs_more_than_it_plans_gives_memory_back_a_few_times_only():
    (times,) = printed(TIMES, "kept")
    assert 2 <= int(times) <= 5


@ON_GLIBC
def test_nothing_is_given_back_where_the_allocator_is_left_alone():
    assert printed(TIMES) == ["0"]


@ON_GLIBC
def test_the_job_looks_before_each_step(tmp_path):
    text = write_text(tmp_path / "text", files=1, documents=8)
    overrides = [f"data.path={text}", "batch.rows=4", "batch.length=64", "capture.layers=[1]", "run.progress=false"]
    *_, times = printed(JOB, *overrides, f"store.path={tmp_path / 'store'}")
    assert int(times) >= 3  # the first is before the steps
