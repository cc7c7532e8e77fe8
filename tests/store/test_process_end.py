"""A process that read a store ends with its own exit code, however late threads of libraries run."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.store.format.tables import encode_table
from pipeline.store.io.parquet import decode_parquet

TABLE = pa.table({name: [f"{name} {k}" for k in range(100)] for name in ("id", "source", "text")})

# Pyarrow's threads begin when they are first given something to do, and never end.
COUNTS_THREADS = """
import os, sys
import pyarrow
from pipeline.store.io.parquet import decode_parquet

before = set(os.listdir("/proc/self/task"))
table = decode_parquet(sys.stdin.buffer.read(), verify_pages=True)
print(table.num_rows, len(set(os.listdir("/proc/self/task")) - before))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="lists threads as Linux does")
def test_pyarrows_threads_have_no_part_in_decoding_a_table():
    """So none can release the file's bytes, which are Python's, after Python has begun to end."""
    command = [sys.executable, "-c", COUNTS_THREADS]
    result = subprocess.run(command, input=encode_table(TABLE), capture_output=True, check=True)
    assert result.stdout.split() == [b"100", b"0"]


def test_a_table_is_decoded_as_it_was_encoded():
    assert decode_parquet(encode_table(TABLE)).equals(TABLE, check_metadata=True)
