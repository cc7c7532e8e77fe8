"""A process does not end within a read."""

import subprocess
import sys

from material import write_parquet

# A thread of pyarrow is in Python's `read` for the feed's thread when the main thread ends.
ENDS_WHILE_READING = """
import io, sys, threading, time
from fsspec.implementations.local import LocalFileSystem
from pipeline.config.schema import ParquetData
from pipeline.data.parquet import ParquetSource

begun = threading.Event()

class SlowFile(io.FileIO):
    def read(self, size=-1):
        if is_open:
            begun.set()
            time.sleep(0.5)
        return super().read(size)

is_open = False
source = ParquetSource(ParquetData(source="parquet", path=sys.argv[1]))
LocalFileSystem.open = lambda self, path, mode: SlowFile(path, mode)
documents = source.read(0, 0)
print(next(documents).text)
begun.clear()
is_open = True
threading.Thread(target=list, args=(documents,), daemon=True).start()
begun.wait()
"""


def test_the_process_waits_for_a_read_at_its_end(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(str(path), {"text": [f"text {k}" for k in range(8)], "id": list("abcdefgh")}, row_group_size=2)
    command = [sys.executable, "-c", ENDS_WHILE_READING, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "text 0\n"), result.stderr
