"""Rows of JSON, CSV and text files, as they are written, and documents of rows.

`datasets` infers types: the texts "007", "NA" and "2020-01-01" would become a number, a null and a time. It refuses
files whose columns differ, also if no template uses these columns.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TextIO

import pyarrow as pa

from pipeline.config.choices import OnError
from pipeline.core.errors import InputError
from pipeline.data.documents import Document, SkippedDocument
from pipeline.data.files import InputFile
from pipeline.data.parquet_file import Row

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
