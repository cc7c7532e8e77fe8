"""Opens a parquet file and reads its row groups in batches. Distinguishes damage from all other failures."""

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
_BYTES_PER_READ = 64 << 20  # fewer rows are read at once if they are larger than this together
_MAX_BYTES_AHEAD = 64 << 20  # decoded size up to which a row group is read while the previous one is used

_EXIT_TIMEOUT_S = 10.0  # how long a read may delay the exit of the process

T = TypeVar("T")


class _Reads:
    """A context manager for reads by pyarrow, which counts those in progress, so that the process does not exit during
    one.

    Threads of pyarrow call methods of Python file objects. Python stops such a thread when it exits, which aborts the
    process ("terminate called without an active exception", exit code 134) or makes it wait forever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._in_progress = 0
        self._has_ended = False

    def __enter__(self) -> None:
        with self._changed:
            if self._has_ended:
                raise PipelineError("the process is exiting and reads no more data.")
            self._in_progress += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._in_progress -= 1
            self._changed.notify_all()

    def end(self) -> None:
        """Prevents new reads, and waits for those in progress, but not longer than _EXIT_TIMEOUT_S."""
        with self._changed:
            self._has_ended = True
            self._changed.wait_for(lambda: not self._in_progress, _EXIT_TIMEOUT_S)


_reads = _Reads()
atexit.register(_reads.end)


class ParquetDamage(InputError):
    """The file's content cannot be read from `row` on, the first row of a batch. reason: the message without the file's
    path and a remedy."""

    def __init__(self, file: InputFile, place: str, row: int, error: Exception) -> None:
        self.row = row
        self.reason = f"{place}: not readable as parquet: {' '.join(str(error).split()).rstrip('.')}"
        super().__init__(
            f"{file.path}, {self.reason}. Expected a complete parquet file. Download it again, or set "
            "data.on_error=skip to skip the rest."
        )


@contextmanager
def open_parquet(file: InputFile) -> Iterator[pq.ParquetFile]:
    """Opens a file and reads its footer. Raises ParquetDamage; InputError if the file is missing, or its size has
    changed since it was listed; PipelineError if it cannot be reached."""
    with open_readers(file) as (parquet, _):
        yield parquet


@contextmanager
def open_readers(file: InputFile) -> Iterator[tuple[pq.ParquetFile, pq.ParquetFile]]:
    """Two readers of one open file, for two threads. See `open_parquet`."""
    with file.open() as stream:
        if file.size is not None and (size := stream.seek(0, os.SEEK_END)) != file.size:
            raise InputError(
                f"{file.path} has {size} bytes, but had {file.size} when it was listed. Do not change the files of a "
                "running job. Restore the file, and run the same command again."
            )
        with _reads, _damage_named(file, "footer", 0):
            # Without pre_buffer, every column of a row group takes a separate request.
            parquet = pq.ParquetFile(stream, pre_buffer=True)
        yield parquet, pq.ParquetFile(stream.duplicate(), metadata=parquet.metadata, pre_buffer=True)


def read_row_groups(
    file: InputFile,
    readers: tuple[pq.ParquetFile, pq.ParquetFile],
    groups: Sequence[tuple[int, int]],
    columns: Sequence[str],
) -> Iterator[Iterator[tuple[int, pa.RecordBatch]]]:
    """The batches of each row group. groups: the row groups' numbers and first rows.

    While one row group is used, a thread fetches the next one, unless it is large, and decodes its first batch. The two
    `readers` alternate, since each keeps the bytes of its last row group. ParquetDamage is raised after the batches
    before the damage.
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
    """Calls a function in a daemon thread. The returned function waits for its result, or raises its exception."""
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
    """The batches of one row group, each with its first row in the file. first: the row group's first row.

    Raises ParquetDamage. The batches of a file always begin at the same rows.
    """
    index = first
    sizes = parquet.metadata.row_group(group)
    row_bytes = max(1, sizes.total_byte_size // max(1, sizes.num_rows))
    rows = min(_ROWS_PER_READ, max(1, _BYTES_PER_READ // row_bytes))
    # Without threads of pyarrow, which might release the bytes that were read while Python exits.
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
    """Turns pyarrow's errors about the file's content, including OSError, into ParquetDamage.

    Errors of the system or the network are already PipelineErrors, from `InputStream`.
    """
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ParquetDamage(file, place, row, error) from error
