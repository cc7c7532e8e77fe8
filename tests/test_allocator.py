"""What is freed stays with the process, and is used again without page faults."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, threading
{setting}

def large():  # larger than the 64 MiB that glibc gives a thread's own heap
    b"x" * int(96 << 20)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def in_thread():
    thread = threading.Thread(target=large)
    thread.start()
    thread.join()

in_thread()
before = faults()
for _ in range(4):
    in_thread()
print(faults() - before)
"""
SETTING = "from pipeline.allocator import keep_freed_memory; keep_freed_memory()"


def page_faults(setting: str) -> int:
    program = PROGRAM.format(setting=setting)
    return int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_buffers_come_again_without_page_faults() -> None:
    kept, given_back = page_faults(SETTING), page_faults("")
    assert given_back > 20 * max(kept, 5), (kept, given_back)
