"""A process that read a store ends with its exit code: no library thread uses Python objects at exit."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.store.io.parquet import encode_table
from tests.store.example_store import copy_store

pytestmark = pytest.mark.heavy
TABLE = pa.table({name: [f"{name} {k}" for k in range(100)] for name in ("id", "source", "text")})

# Pyarrow's threads start with their first task and never end.
COUNTS_THREADS = """
import os, sys
import pyarrow
from pipeline.store.io.parquet import decode_parquet

before = set(os.listdir("/proc/self/task"))
table = decode_parquet(sys.stdin.buffer.read(), 1 << 20)
print(table.num_rows, len(set(os.listdir("/proc/self/task")) - before))
"""


READS_HALF = """
import json, sys
from pipeline.store import ActivationStore

json.reader = ActivationStore.open(sys.argv[1]).batches("embed", 3, shuffle=True)  # in a module that is cleared late
next(json.reader)
"""


def test_a_half_read_reader_ends_without_a_message(tmp_path):
    copy_store(str(tmp_path))
    result = subprocess.run([sys.executable, "-c", READS_HALF, tmp_path], capture_output=True, text=True, check=True)
    assert "Exception ignored" not in result.stderr


READS_IN_A_THREAD = """
import sys, threading, time
from pipeline.store import ActivationStore

reader = ActivationStore.open(sys.argv[1]).batches("embed", 3)
next(reader)
threading.Thread(target=lambda: [time.sleep(0.1) for _ in reader]).start()
"""


def test_a_pass_that_the_end_of_the_main_thread_cuts_raises_in_its_thread(tmp_path):
    copy_store(str(tmp_path))
    result = subprocess.run([sys.executable, "-c", READS_IN_A_THREAD, tmp_path], capture_output=True, text=True)
    assert "Join the thread that uses this reader first" in result.stderr


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="lists threads as Linux does")
def test_decoding_a_table_starts_no_pyarrow_threads():
    """Such a thread could release the file's bytes, a Python object, while Python exits."""
    command = [sys.executable, "-c", COUNTS_THREADS]
    result = subprocess.run(command, input=encode_table(TABLE), capture_output=True, check=True)
    assert result.stdout.split() == [b"100", b"0"]
