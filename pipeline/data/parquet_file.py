"""One parquet file: opened, its row groups read in batches, and damage told from everything else that fails."""

import atexit
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import InputError, PipelineError
from pipeline.data.files import InputFile

_ROWS_PER_READ = 512
_BYTES_PER_READ = 64 << 20  # of rows so large that 512 of them would be more: fewer are read at once
_MAX_BYTES_AHEAD = 64 << 20  # of a row group, decoded, that is read while the one before it is used

_EXIT_TIMEOUT_S = 10.0  # that a read may keep the process from ending

T = TypeVar("T")


class _Reads:
    """Counts pyarrow's reads that are under way, a context manager around each, so that the process does not end amid
    one.

    Threads of pyarrow's call our files, which are Python's, and Python stops such a thread once it has begun to end:
    the thread aborts the process ("terminate called without an active exception", exit code 134), or the process
    waits for it for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._has_ended = False

    def __enter__(self) -> None:
        with self._changed:
            if self._has_ended:
                raise PipelineError("the process ends, so nothing more is read.")
            self._under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def end(self) -> None:
        """Waits for the reads that are under way, but not for a source that hangs; no other begins after."""
        with self._changed:
            self._has_ended = True
            self._changed.wait_for(lambda: not self._under_way, _EXIT_TIMEOUT_S)


_reads = _Reads()
atexit.register(_reads.end)


class ParquetDamage(InputError):
    """The file's content is not parquet from `row` on: the first row of the batch that cannot be read.

    `reason` says so without the file's path or a remedy.
    """

    def __init__(self, file: InputFile, place: str, row: int, error: Exception) -> None:
        self.row = row
        self.reason = f"{place}: not readable as parquet: {' '.join(str(error).split()).rstrip('.')}"
        super().__init__(
            f"{file.path}, {self.reason}. Expected a whole parquet file; download it again, or set data.on_error=skip "
            "to leave out what follows."
        )


@contextmanager
def open_parquet(file: InputFile) -> Iterator[pq.ParquetFile]:
    """The file with its footer read. Raises ParquetDamage, InputError for no file or one of another size than it was
    listed with, PipelineError for no access."""
    with open_readers(file) as (parquet, _):
        yield parquet


@contextmanager
def open_readers(file: InputFile) -> Iterator[tuple[pq.ParquetFile, pq.ParquetFile]]:
    """Two readers of one open file, for two threads. See `open_parquet`."""
    with file.open() as stream:
        if file.size is not None and (size := stream.seek(0, os.SEEK_END)) != file.size:
            raise InputError(
                f"{file.path} has {size} bytes, and had {file.size} when it was listed. Leave the files of a job alone "
                "while it runs: restore it, and run the same command again."
            )
        with _reads, _damage_named(file, "footer", 0):
            # Without pre_buffer every column of a row group is a request of its own.
            parquet = pq.ParquetFile(stream, pre_buffer=True)
        yield parquet, pq.ParquetFile(stream.another(), metadata=parquet.metadata, pre_buffer=True)


def read_row_groups(
    file: InputFile,
    readers: tuple[pq.ParquetFile, pq.ParquetFile],
    groups: Sequence[tuple[int, int]],
    columns: Sequence[str],
) -> Iterator[Iterator[tuple[int, pa.RecordBatch]]]:
    """The batches of each of the row groups, given by their numbers and first rows. Raises ParquetDamage where its turn
    comes.

    While one is used the next is fetched and its first batch decoded, in a thread, unless it is large. The `readers`
    take turns, since each keeps the bytes of the row group that it read last.
    """
    metadata = readers[0].metadata

    def begin(position: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        batches = row_batches(file, readers[position % 2], *groups[position], columns)
        return chain(list(islice(batches, 1)), batches)

    current = partial(begin, 0)
    for position in range(len(groups)):
        batches = current()
        if position + 1 < len(groups):
            current = partial(begin, position + 1)
            if metadata.row_group(groups[position + 1][0]).total_byte_size <= _MAX_BYTES_AHEAD:
                current = _in_background(current)
        yield batches


def _in_background(call: Callable[[], T]) -> Callable[[], T]:
    """Calls a function in a thread, which does not keep the process from ending; waits for what it returns or
    raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="read-ahead", daemon=True).start()
    return future.result


def row_batches(
    file: InputFile, parquet: pq.ParquetFile, group: int, first: int, columns: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batches of one row group, each with its first row. `first` is the group's own first row in the file.

    Raises ParquetDamage. Batches begin at the same rows whatever is done with them.
    """
    index = first
    sizes = parquet.metadata.row_group(group)
    row_bytes = max(1, sizes.total_byte_size // max(1, sizes.num_rows))
    rows = min(_ROWS_PER_READ, max(1, _BYTES_PER_READ // row_bytes))
    # By one thread: pyarrow's would release the bytes that were read when it suits them, even once Python ends.
    batches = parquet.iter_batches(rows, row_groups=[group], columns=list(columns), use_threads=False)
    while True:
        with _reads, _damage_named(file, f"row {index}", index):
            batch = next(batches, None)
        if batch is None:
            return
        yield index, batch
        index += batch.num_rows


@contextmanager
def _damage_named(file: InputFile, place: str, row: int) -> Iterator[None]:
    """Turns pyarrow's errors about the file's content, an OSError among them, into ParquetDamage.

    What the system or the network raises is a PipelineError already: `InputFile.open` sees to that.
    """
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ParquetDamage(file, place, row, error) from error
