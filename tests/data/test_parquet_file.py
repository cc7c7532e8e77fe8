"""Which row groups are read, and that a process does not end within a read."""

import io
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from material import write_parquet

from pipeline.config.schema import ParquetData
from pipeline.core.errors import PipelineError
from pipeline.data.parquet import ParquetSource

GROUPS, ROWS = 5, 3
LIMIT_S = 60


class WatchedFile(io.FileIO):
    """Records which row groups are read; `failing` cannot be read."""

    begins: list[int]
    seen: set[int]
    failing: int | None

    def read(self, size: int = -1) -> bytes:
        group = sum(begin <= self.tell() for begin in self.begins) - 1
        if 0 <= group < GROUPS:
            self.seen.add(group)
            if group == self.failing:
                raise OSError("Forbidden: not today")
        return super().read(size)


@pytest.fixture
def source(tmp_path: Path, monkeypatch) -> ParquetSource:
    path = tmp_path / "a.parquet"
    texts = [f"text {row}" for row in range(GROUPS * ROWS)]
    write_parquet(str(path), {"text": texts, "id": [str(row) for row in range(GROUPS * ROWS)]}, row_group_size=ROWS)
    metadata = pq.ParquetFile(path).metadata
    groups = [metadata.row_group(group).column(0) for group in range(GROUPS)]
    WatchedFile.begins = [column.dictionary_page_offset or column.data_page_offset for column in groups]
    WatchedFile.begins.append(path.stat().st_size - 8 - metadata.serialized_size)
    WatchedFile.seen, WatchedFile.failing = set(), None
    source = ParquetSource(ParquetData(source="parquet", path=str(path)))
    monkeypatch.setattr(LocalFileSystem, "open", lambda self, path, mode: WatchedFile(path, mode))
    return source


@pytest.mark.parametrize("start", range(0, GROUPS * ROWS, 2))
def test_reading_begins_with_the_row_group_of_its_first_row(start: int, source: ParquetSource) -> None:
    rows = [document.index for document in source.read(0, start)]
    assert rows == list(range(start, GROUPS * ROWS))
    assert WatchedFile.seen == {*range(start // ROWS, GROUPS)}


def test_an_error_is_raised_after_the_documents_before_it(source: ParquetSource) -> None:
    WatchedFile.failing = 2
    documents = source.read(0, 0)
    assert [next(documents).index for _ in range(2 * ROWS)] == list(range(2 * ROWS))
    with pytest.raises(PipelineError, match="Forbidden: not today"):
        next(documents)


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
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert (result.returncode, result.stdout) == (0, "text 0\n"), result.stderr
