"""Reading ahead: while a row group is used, the next one is read. Closing a reader does not wait for it."""

import io
import subprocess
import sys
import threading
from collections.abc import Iterator
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
    """Records which row groups are read. Reading a group waits for its event in `gates`; `failing` cannot be read."""

    begins: list[int]
    seen: list[threading.Event]
    gates: dict[int, threading.Event]
    failing: int | None

    def read(self, size: int = -1) -> bytes:
        group = sum(begin <= self.tell() for begin in self.begins) - 1
        if 0 <= group < GROUPS:
            self.seen[group].set()
            if group in self.gates:
                assert self.gates[group].wait(LIMIT_S)
            if group == self.failing:
                raise OSError("Forbidden: not today")
        return super().read(size)


@pytest.fixture
def source(tmp_path: Path, monkeypatch) -> Iterator[ParquetSource]:
    path = tmp_path / "a.parquet"
    texts = [f"text {row}" for row in range(GROUPS * ROWS)]
    write_parquet(str(path), {"text": texts, "id": [str(row) for row in range(GROUPS * ROWS)]}, row_group_size=ROWS)
    metadata = pq.ParquetFile(path).metadata
    groups = [metadata.row_group(group).column(0) for group in range(GROUPS)]
    WatchedFile.begins = [column.dictionary_page_offset or column.data_page_offset for column in groups]
    WatchedFile.begins.append(path.stat().st_size - 8 - metadata.serialized_size)
    WatchedFile.seen = [threading.Event() for _ in range(GROUPS)]
    WatchedFile.gates = {}
    WatchedFile.failing = None
    source = ParquetSource(ParquetData(source="parquet", path=str(path)))
    monkeypatch.setattr(LocalFileSystem, "open", lambda self, path, mode: WatchedFile(path, mode))
    yield source
    for gate in WatchedFile.gates.values():
        gate.set()


def test_the_next_row_group_is_read_while_one_is_used(source: ParquetSource) -> None:
    for row, document in enumerate(source.read(0, 0)):
        assert document.text == f"text {row}"
        group = row // ROWS
        if group + 1 < GROUPS:
            assert WatchedFile.seen[group + 1].wait(LIMIT_S), f"row group {group + 1} is not read ahead"
        assert not any(event.is_set() for event in WatchedFile.seen[group + 2 :])


@pytest.mark.parametrize("start", range(0, GROUPS * ROWS, 2))
def test_reading_begins_with_the_row_group_of_its_first_row(start: int, source: ParquetSource) -> None:
    rows = [document.index for document in source.read(0, start)]
    assert rows == list(range(start, GROUPS * ROWS))
    assert [event.is_set() for event in WatchedFile.seen] == [group >= start // ROWS for group in range(GROUPS)]


def test_an_error_is_raised_after_the_documents_before_it(source: ParquetSource) -> None:
    WatchedFile.failing = 2
    documents = source.read(0, 0)
    assert [next(documents).index for _ in range(2 * ROWS)] == list(range(2 * ROWS))
    with pytest.raises(PipelineError, match="Forbidden: not today"):
        next(documents)


def test_closing_a_reader_does_not_wait_for_reading_ahead(source: ParquetSource) -> None:
    WatchedFile.gates = {1: threading.Event()}
    documents = source.read(0, 0)
    next(documents)
    assert WatchedFile.seen[1].wait(LIMIT_S)
    documents.close()
    assert not WatchedFile.gates[1].is_set()


# A thread of pyarrow is in Python's `read` when the main thread ends.
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
next(documents), next(documents)  # of the second row group: the third is read
begun.wait()
"""


def test_the_process_waits_for_reading_ahead_at_its_end(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(str(path), {"text": [f"text {k}" for k in range(8)], "id": list("abcdefgh")}, row_group_size=2)
    command = [sys.executable, "-c", ENDS_WHILE_READING, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert (result.returncode, result.stdout) == (0, "text 0\n"), result.stderr
