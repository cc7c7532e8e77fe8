"""Rows of parquet, JSON, CSV and text files, as they are written, and documents of rows.

`datasets` infers types: the texts "007", "NA" and "2020-01-01" would become a number, a null and a time. It refuses
files whose columns differ, also if no template uses these columns. Of parquet files, row groups are read in batches;
damage is distinguished from all other failures.
"""

import atexit
import bz2
import csv
import gzip
import io
import json
import lzma
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.choices import OnError
from pipeline.core.errors import InputError, PipelineError
from pipeline.core.range_file import RangeFile
from pipeline.data.documents import Document, SkippedDocument
from pipeline.data.files import OTHER_FORMATS, InputFile

Types = Mapping[str, pa.DataType | None]
Row = Mapping[str, Any]

_BUFFER_BYTES = 1 << 16
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_MAGIC_BYTES = 6
_DECOMPRESSORS: Mapping[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda stream: io.BufferedReader(
        pa.input_stream(pa.PythonFile(stream, "r"), compression="zstd"), _BUFFER_BYTES
    ),
}

csv.field_size_limit(1 << 30)  # Python's default limit for one text is 128 KiB

_ROWS_PER_READ = 512
_BYTES_PER_READ = 16 << 20  # fewer rows are read at once if they are larger than this together
_OPTIONS = {"pre_buffer": True, "page_checksum_verification": True}  # else each column takes a separate request
_ALL = slice(None)

# pyarrow's errors about a file's content. Errors of the system or the network are already PipelineErrors, from
# `InputFile.open`.
_DAMAGE = (pa.ArrowException, OSError)

_EXIT_TIMEOUT_S = 10.0  # how long a read may delay the exit of the process


def documents_of_rows(
    rows: Iterator[tuple[int, Row] | SkippedDocument],
    document: Callable[[int, Row], Document],
    shard: str,
    where: str,
    on_error: OnError,
    remedy: str = "Repair or replace the file",
) -> Iterator[Document | SkippedDocument]:
    """A document for each row, or a skip where `document` raises ValueError. where, remedy: for messages.

    Raises InputError for a skip unless skips are allowed.
    """
    for item in rows:
        if not isinstance(item, SkippedDocument):
            try:
                yield document(*item)
                continue
            except ValueError as error:
                item = SkippedDocument(shard, item[0], str(error))
        yield item.if_allowed(on_error, f"{where} row {item.index}", remedy)


@contextmanager
def open_text(file: InputFile) -> Iterator[TextIO]:
    """The text of a file, decompressed, without a byte order mark. Bytes that are not UTF-8 become lone surrogates,
    which are noticed where they are used. Raises InputError for UTF-16 and UTF-32."""
    with file.open() as stream:
        buffered = io.BufferedReader(stream, _BUFFER_BYTES)
        begin = buffered.peek(_MAGIC_BYTES)
        for magic, decompress in _DECOMPRESSORS.items():
            if begin.startswith(magic):
                buffered = decompress(buffered)
        require_utf8(buffered.peek(4), file.path)
        yield io.TextIOWrapper(buffered, "utf-8-sig", "surrogateescape", newline="")


def require_utf8(content: bytes, where: str) -> None:
    """Raises InputError if the content begins with the byte order mark of UTF-16 or UTF-32."""
    if content.startswith(_UTF16_MARKS):
        raise InputError(
            f"{where} is UTF-16 or UTF-32, expected UTF-8. Convert it, e.g. with iconv -f UTF-16 -t UTF-8."
        )


def text_rows(file: TextIO) -> Iterator[Row | None]:
    """A row with the column `text` for each line; None for a blank line."""
    for line in file:
        yield {"text": line.rstrip("\r\n")} if line.strip() else None


def csv_rows(file: TextIO, names: list[str] | None, **dialect: Any) -> Iterator[Row | str | None]:
    """A row of texts for each record; None for a blank line, a reason for a record that cannot be read.

    names: the columns; None to read them from the first line. A column that the header has twice is left out.
    """
    reader = csv.reader(file, strict=True, **dialect)
    names = names or next(filter(None, reader), [])
    unique = [name for name in names if names.count(name) == 1]
    while True:
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"not CSV: {error}"
            continue
        if len(values) > len(names):
            yield f"it has {len(values)} fields, but the file has {len(names)} columns"
        elif not values:
            yield None
        else:
            row = dict(zip(names, values, strict=False))  # a short record lacks the last columns
            yield {name: row.get(name) for name in unique}


def json_rows(file: TextIO) -> Iterator[Row | str | None]:
    """The rows of JSON Lines, or of a file with one list or one object; None for a blank line, a reason for a line that
    is not an object. A text stands for an object with the column `text`."""
    head = list(islice(file, 2))
    if any(isinstance(_json_row(line), dict) for line in head) and not head[0].lstrip().startswith("["):
        yield from map(_json_row, chain(head, file))
        return
    text = "".join(chain(head, file))
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        yield from map(_json_row, text.split("\n"))
    else:
        yield from map(_as_row, value if isinstance(value, list) else [value])


def _json_row(line: str) -> Row | str | None:
    if not line.strip():
        return None
    try:
        return _as_row(_DECODER.decode(line))
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"


def _as_row(value: Any) -> Row | str:
    if isinstance(value, str):
        return {"text": value}
    return value if isinstance(value, dict) else f"not an object but {type(value).__name__}"


_DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # NaN, which pandas and Python write, is null


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
    """The file's footer cannot be read. reason: the message without the file's path and a remedy."""

    def __init__(self, file: InputFile, error: Exception) -> None:
        self.reason = f"footer: {_reason(error)}"
        super().__init__(
            f"{file.path}, {self.reason}. Expected a complete parquet file. Download it again, or set "
            f"data.on_error=skip to skip it. {OTHER_FORMATS}"
        )


def _reason(error: Exception) -> str:
    return f"not readable as parquet: {' '.join(str(error).split()).rstrip('.')}"


def read_footer(file: InputFile) -> pq.FileMetaData:
    """A file's footer. Raises ParquetDamage; InputError if the file is missing, or its size has changed since it was
    listed; PipelineError if it cannot be reached."""
    with file.open() as stream:
        return _parquet(file, stream).metadata


def _parquet(file: InputFile, stream: RangeFile) -> pq.ParquetFile:
    """Reads the footer of an open file. Raises as `read_footer`."""
    if file.size is not None and (size := stream.seek(0, os.SEEK_END)) != file.size:
        raise InputError(
            f"{file.path} has {size} bytes, but had {file.size} when it was listed. Do not change the files of a "
            "running job. Restore the file, and run the same command again."
        )
    try:
        with _reads:
            return pq.ParquetFile(stream, **_OPTIONS)
    except _DAMAGE as error:
        raise ParquetDamage(file, error) from error


def parquet_rows(
    file: InputFile, start: int, columns: Callable[[pq.ParquetFile], Types], groups: slice = _ALL
) -> Iterator[tuple[int, Row] | SkippedDocument]:
    """The rows of some row groups of a file from row `start` on, each with its number in the file. Does not read
    earlier row groups.

    columns: checks the file, and returns the names of the columns to read, and the types to convert them to.
    A skip stands for a row group from the damage on, or for a file whose footer is damaged. Raises InputError for a
    column that cannot be converted.
    """
    with file.open() as stream:
        try:
            parquet = _parquet(file, stream)
        except ParquetDamage as damage:
            yield SkippedDocument(file.name, start, damage.reason, None)
            return
        types = columns(parquet)
        for item in _batches(file, stream, parquet.metadata, list(types), start, groups):
            if isinstance(item, SkippedDocument):
                yield item
                continue
            first, batch = max(item[0], start), item[1].slice(max(0, start - item[0]))
            rows = zip(*(_values(_converted(file, batch, *field)) for field in types.items()), strict=True)
            yield from enumerate((dict(zip(types, row, strict=True)) for row in rows), first)


def _batches(
    file: InputFile, stream: RangeFile, metadata: pq.FileMetaData, columns: list[str], start: int, groups: slice
) -> Iterator[tuple[int, pa.RecordBatch] | SkippedDocument]:
    """The batches of the row groups, see `_row_batches`. Each row group has a reader of its own, which keeps the bytes
    of the whole row group."""
    end = 0
    for group in range(metadata.num_row_groups):
        first, end = end, end + metadata.row_group(group).num_rows
        if start < end and group in range(metadata.num_row_groups)[groups]:
            parquet = pq.ParquetFile(stream, metadata=metadata, **_OPTIONS)
            yield from _row_batches(file, parquet, group, first, columns)


def _converted(file: InputFile, batch: pa.RecordBatch, name: str, kind: pa.DataType | None) -> pa.Array:
    try:
        return batch[name] if kind is None else batch[name].cast(kind)
    except pa.ArrowException as error:
        raise InputError(
            f"{file.path}: column {name!r} is {batch[name].type}, which cannot be converted to {kind}, its type in "
            f"FineWeb: {error}. Rename or convert the column."
        ) from error


def _row_batches(
    file: InputFile, parquet: pq.ParquetFile, group: int, first: int, columns: list[str]
) -> Iterator[tuple[int, pa.RecordBatch] | SkippedDocument]:
    """The batches of one row group, each with its first row in the file, or a skip of its rows from the damage on.
    first: the row group's first row. The batches of a file always begin at the same rows."""
    index, sizes = first, parquet.metadata.row_group(group)
    row_bytes = max(1, sizes.total_byte_size // max(1, sizes.num_rows))
    rows = min(_ROWS_PER_READ, max(1, _BYTES_PER_READ // row_bytes))
    # Without threads of pyarrow, which might release the bytes that were read while Python exits.
    batches = parquet.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)
    while True:
        try:
            with _reads:
                batch = next(batches, None)
        except _DAMAGE as error:
            yield SkippedDocument(file.name, index, _reason(error), first + sizes.num_rows - index)
            return
        if batch is None:
            return
        yield index, batch
        index += batch.num_rows


def _values(column: pa.Array) -> list[Any]:
    """The column as Python values, with texts instead of bytes. Those that are not UTF-8 have lone surrogates, which
    are noticed where they are used."""
    try:
        found = column.to_pylist()
    except UnicodeDecodeError:
        found = column.cast(pa.large_binary()).to_pylist()
    return [value.decode(errors="surrogateescape") if isinstance(value, bytes) else value for value in found]
