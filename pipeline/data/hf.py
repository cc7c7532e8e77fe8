"""Documents from any dataset that `datasets` can stream. A template makes each row a text."""

import datetime
import hashlib
import json
import os
import posixpath
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import datasets
import fsspec
import jinja2
import pyarrow as pa
from datasets.packaged_modules.json.json import Json
from fsspec.implementations.local import LocalFileSystem

from pipeline.config.choices import OnError
from pipeline.config.schema import HfData
from pipeline.core.errors import ConfigError, InputError
from pipeline.core.retries import repeated
from pipeline.data.documents import DOCUMENT_SCHEMA, Document, SkippedDocument
from pipeline.data.files import input_errors, require_readable
from pipeline.data.hub_files import dataset_errors, is_damage, open_builder
from pipeline.data.text.templates import RenderError, TextTemplate

_PEEKED_BYTES = 1 << 12


class HfSource:
    """One source shard per shard of the streamed dataset, which is a file in most formats."""

    shards: tuple[str, ...]
    info_schema: pa.Schema

    def __init__(self, config: HfData) -> None:
        """Finds the dataset's files.

        Raises ConfigError for an invalid template or name, and InputError if there are no files.
        """
        self._config = config
        try:
            self._template = TextTemplate(config.text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"data.text is not a jinja template: {error}. Got {config.text!r:.300}.") from error
        except jinja2.TemplateError as error:
            raise ConfigError(f"data.text={config.text!r:.200} cannot be used: {error}. Correct it.") from error
        if reserved := sorted({*config.info_columns} & {*DOCUMENT_SCHEMA.names}):
            raise ConfigError(f"data.info_columns has {reserved[0]}, which every store has. Remove it.")
        if twice := [name for name in config.info_columns if config.info_columns.count(name) > 1]:
            raise ConfigError(f"data.info_columns has {twice[0]} twice. Remove one of them.")
        self._dataset, files = _stream(config)
        if len({posixpath.isabs(file) for file in files}) > 1:
            raise ConfigError("data.data_files has both local files and URLs, expected one kind. Move or copy some.")
        base = posixpath.commonpath([posixpath.dirname(file) for file in files])
        self._files = tuple(posixpath.relpath(file, base) for file in files)
        self._files_sha256 = _files_sha256(files, self._files)
        count = self._dataset.num_shards
        numbered = tuple(f"{config.split}-{shard:05d}-of-{count:05d}" for shard in range(count))
        self.shards = self._files if len(files) == count else numbered
        self.info_schema = pa.schema([(name, pa.string()) for name in config.info_columns])

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        """The documents of a shard from row `start` on. Earlier rows are read, but not tokenised."""
        name = self.shards[shard]
        rows = iter(self._dataset.shard(len(self.shards), shard).skip(start))
        index = start
        while (row := self._next(rows, name, index)) is not None:
            try:
                yield self._document(row, name, index)
            except ValueError as error:
                if self._config.on_error is OnError.fail:
                    raise InputError(
                        f"{self._config.path}, {name} row {index}: {error}. Repair the data or set data.on_error=skip."
                    ) from error
                yield SkippedDocument(name, index, str(error))
            index += 1

    def fingerprint(self) -> dict[str, object]:
        """The template and columns, and a digest of the names and sizes of the dataset's files."""
        config = self._config
        return {
            "source": "hf",
            "subset": config.subset,
            "split": config.split,
            "text": config.text,
            "id_column": config.id_column,
            "info_columns": list(config.info_columns),
            "num_files": len(self._files),
            "files_sha256": self._files_sha256,
        }

    def _next(self, rows: Iterator[dict[str, Any]], name: str, index: int) -> dict[str, Any] | None:
        place = f"{self._config.path}, {name}"
        with input_errors(f"{place} row {index}"):
            try:
                return next(rows, None)
            except Exception as error:
                if not is_damage(error):
                    raise
                raise InputError(
                    f"{place} is not readable from row {index} on: {error}. Repair or replace the file."
                ) from error

    def _document(self, row: dict[str, Any], shard: str, index: int) -> Document:
        """Raises ValueError for a bad row, and InputError for a column that the dataset lacks."""
        config = self._config
        wanted = {*self._template.columns, *config.info_columns, *([config.id_column] if config.id_column else [])}
        if missing := sorted(wanted - row.keys()):
            raise InputError(
                f"{config.path}, {shard} has no column {', '.join(missing)}, only {', '.join(row)}. "
                "Use only these columns in data.text, data.id_column and data.info_columns."
            )
        try:
            text = self._template(row)
        except RenderError as error:
            raise ValueError(f"data.text does not render: {error}") from error
        if not text:
            raise ValueError("the text is empty")
        identity = row[config.id_column] if config.id_column else f"{shard}#{index}"
        if identity is None:
            raise ValueError(f"{config.id_column!r} is null")
        info = {name: None if row[name] is None else _as_text(name, row[name]) for name in config.info_columns}
        return Document(str(identity), text, shard, index, info)


def _as_text(column: str, value: Any) -> str:
    """Strings and dates as they are, all others as JSON. Raises ValueError for values that JSON does not have."""
    if isinstance(value, str | datetime.date | datetime.time):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"{column!r} cannot be stored as text: {error}") from error


def _stream(config: HfData) -> tuple[datasets.IterableDataset, list[str]]:
    """The dataset, opened for streaming, and the paths or URLs of its split's files."""
    data_files = config.data_files
    if data_files is not None:
        data_files = [data_files] if isinstance(data_files, str) else data_files
        data_files = [os.path.expanduser(file) for file in data_files]
    path = os.path.expanduser(config.path)
    builder = open_builder(path, config.subset, split=config.split, data_files=data_files, revision=config.revision)
    files = [str(file) for file in builder.config.data_files[config.split]]
    for file in files:
        with input_errors(file):
            filesystem, file_path = fsspec.core.url_to_fs(file)
            require_readable(filesystem, file_path, "data.data_files")
            if isinstance(builder, Json) and isinstance(filesystem, LocalFileSystem):
                _require_objects(file_path)
    with dataset_errors(path):
        dataset = builder.as_streaming_dataset(split=config.split)
    return dataset, files


def _require_objects(path: str) -> None:
    """Raises InputError for JSON that begins with null: pyarrow crashes on a block that has nothing else."""
    try:
        with fsspec.open(path, "rb", compression="infer") as file:
            begin = file.read(_PEEKED_BYTES).lstrip()
    except Exception as error:
        if not is_damage(error):
            raise
        raise InputError(f"{path} is not readable: {error}. Repair or replace the file.") from error
    if begin.startswith(b"null"):
        raise InputError(f"{path} begins with null, expected an object for each row. Repair or replace the file.")


def _files_sha256(files: Sequence[str], names: Sequence[str]) -> str:
    """The digest of the files' names and sizes in bytes."""
    sizes = []
    for file, name in zip(files, names, strict=True):
        with input_errors(file):
            filesystem, path = fsspec.core.url_to_fs(file)
            info = repeated(path, partial(filesystem.info, path))
            sizes.append(f"{name} {info['size']}")
    return hashlib.sha256("\n".join(sizes).encode()).hexdigest()
