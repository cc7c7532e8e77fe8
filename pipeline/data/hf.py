"""Documents from any dataset that `datasets` can stream. A template makes each row a text: `data.text`, or the
tokenizer's chat template with `data.messages`."""

import datetime
import glob
import json
import logging
import os
import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import fsspec
import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import DatasetBuilder

from pipeline.config.schema import HfData
from pipeline.core.errors import ConfigError, InputError
from pipeline.core.requests import repeated
from pipeline.data.dataset_files import dataset_errors, is_damage, open_builder
from pipeline.data.documents import DOCUMENT_SCHEMA, Document, SkippedDocument, token_columns, with_tokens
from pipeline.data.files import InputFile, in_parallel, input_errors, require_readable
from pipeline.data.manifest import MakeManifest, Manifest, file_entries, make_alone
from pipeline.data.rows import Row, Types, csv_rows, documents_of_rows, json_rows, open_text, parquet_rows, text_rows
from pipeline.data.text.conversations import Conversations, TemplateForms
from pipeline.data.text.labels import LABELS
from pipeline.data.text.templates import RenderError, TextTemplate
from pipeline.data.text.tokenizer import TextTokenizer

log = logging.getLogger("pipeline")

_FIRST_ROWS = 100  # a column that is in none of these is missing

# The settings of `datasets`' loaders that the own readers of a format follow, or that do not change rows.
_DIALECT = ("quotechar", "escapechar", "doublequote", "skipinitialspace", "quoting")
_SETTINGS = {"name", "version", "data_dir", "data_files", "description", "features", "chunksize", "block_size"}
_SETTINGS |= {"sep", "delimiter", "names", "column_names", *_DIALECT}

_NO_COLUMNS = pa.schema([])
_IndexedRow = tuple[int, Row]


class HfSource:
    """One source shard per shard of the streamed dataset, which is a file in most formats.

    Parquet, JSON, CSV and text are read here, and all other formats by `datasets`.
    """

    shards: tuple[str, ...]
    info_schema: pa.Schema

    def __init__(
        self,
        config: HfData,
        tokenizer: TextTokenizer | None,
        agree: Callable[[MakeManifest], Manifest] = make_alone,
        are_prompts: bool = False,
    ) -> None:
        """Finds the dataset's files. tokenizer: for `data.messages`. agree: as in `open_source`. are_prompts: whether
        the model is to answer conversations.

        Raises ConfigError for an invalid template or name, and InputError if there are no files.
        """
        self._config = config
        self._builder, self._files = _open_files(config)
        is_read_here = _is_read_here(self._builder, self._files)
        is_padded = not is_read_here or self._builder.name == "parquet"
        content = _chats(config, tokenizer, are_prompts, is_padded) if config.messages else _content(config)
        self._content = content
        if reserved := sorted({*config.info_columns} & {*DOCUMENT_SCHEMA.names, *content.info_schema.names}):
            raise ConfigError(f"data.info_columns has {reserved[0]}, which every store has. Remove it.")
        identifiers = [config.id_column] if config.id_column else []
        self._columns = {*content.columns, *config.info_columns, *identifiers}
        self._manifest = agree(lambda: Manifest(file_entries(self._files)))
        if all(file.size == 0 for file in self._files):
            raise InputError(f"{config.path}: all files are empty. Check data.path and data.data_files.")
        self.shards = tuple(file.name for file in self._files)
        self._dataset = None
        if not is_read_here:
            with dataset_errors(config.path):
                self._dataset = self._builder.as_streaming_dataset(split=config.split)
            count = self._dataset.num_shards
            if count != len(self._files):
                self.shards = tuple(f"{config.split}-{shard:05d}-of-{count:05d}" for shard in range(count))
        info = pa.schema([(name, pa.string()) for name in dict.fromkeys(config.info_columns)])
        self.info_schema = pa.unify_schemas([info, content.info_schema])

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        """The documents of a shard from row `start` on. Earlier rows are read, but not tokenised; of parquet files,
        only those in the same row group."""
        name = self.shards[shard]
        rows = self._with_damage(self._rows(shard, start), name, start)
        if not start:
            rows = self._with_columns(rows, name)
        where = f"{self._config.path}, {name}"
        return documents_of_rows(rows, partial(self._document, name), name, where, self._config.on_error)

    def fingerprint(self) -> dict[str, object]:
        """The template and columns, and a digest of the names and sizes of the dataset's files."""
        config = self._config
        return {
            "source": "hf",
            "subset": config.subset,
            "split": config.split,
            **self._content.identity,
            "id_column": config.id_column,
            "info_columns": list(config.info_columns),
            **self._manifest.identity(),
        }

    def _rows(self, shard: int, start: int) -> Iterator[_IndexedRow | SkippedDocument]:
        """The rows of a shard from row `start` on, and skips for lines that are no rows. Blank lines are left out."""
        if self._dataset is not None:
            yield from enumerate(self._dataset.shard(len(self.shards), shard).skip(start), start)
            return
        file, settings = self._files[shard], self._builder.config
        match self._builder.name:
            case "parquet":

                def columns(parquet: pq.ParquetFile) -> Types:
                    self._require_columns(file.name, names := parquet.schema_arrow.names)
                    content = token_columns(self._config.tokens, names) if self._config.tokens else ()
                    return dict.fromkeys(sorted({*self._columns, *content}))

                yield from parquet_rows(file, start, columns)
                return
            case "csv":
                separator = "\t" if settings.sep == "," and ".tsv" in file.name else settings.sep
                dialect = {name: getattr(settings, name) for name in _DIALECT}
                read = partial(csv_rows, names=settings.names, delimiter=separator, **dialect)
            case kind:
                read = json_rows if kind == "json" else text_rows
        with open_text(file) as text:
            for index, row in enumerate(read(text)):
                if index >= start and row is not None:
                    yield SkippedDocument(file.name, index, row) if isinstance(row, str) else (index, row)

    def _with_damage(
        self, rows: Iterator[_IndexedRow | SkippedDocument], name: str, start: int
    ) -> Iterator[_IndexedRow | SkippedDocument]:
        """The rows, with one skip for all rows after damage to the file."""
        index = start
        with input_errors(f"{self._config.path}, {name}"):
            try:
                for item in rows:
                    index = 1 + (item.index if isinstance(item, SkippedDocument) else item[0])
                    yield item
            except Exception as error:
                if not is_damage(error):
                    raise
                yield SkippedDocument(name, index, f"not readable from here on: {error}", None)

    def _with_columns(
        self, rows: Iterator[_IndexedRow | SkippedDocument], name: str
    ) -> Iterator[_IndexedRow | SkippedDocument]:
        """The rows. Raises InputError if a column is in none of the first ones."""
        first, found = [], {}
        for item in islice(rows, _FIRST_ROWS):
            first.append(item)
            found |= {} if isinstance(item, SkippedDocument) else dict.fromkeys(item[1])
            if self._columns <= found.keys():
                break
        if found:
            self._require_columns(name, found)
        return chain(first, rows)

    def _require_columns(self, name: str, columns: Iterable[str]) -> None:
        if missing := sorted(self._columns - {*columns}):
            raise InputError(
                f"{self._config.path}, {name} has no column {', '.join(map(repr, missing))}, only "
                f"{', '.join(map(repr, columns))}. Use only these in data.{self._content.key}, data.id_column and "
                "data.info_columns."
            )

    def _document(self, shard: str, index: int, row: Row) -> Document:
        """Raises ValueError for a bad row."""
        config = self._config
        identity = row.get(config.id_column) if config.id_column else f"{shard}#{index}"
        if identity is None:
            raise ValueError(f"{config.id_column!r} is null")
        info = {name: _as_text(name, row.get(name)) for name in config.info_columns}
        document = self._content.add(Document(str(identity), "", shard, index, info), row)
        if not document.text and document.tokens is None:
            raise ValueError("the text is empty")
        return document


@dataclass(frozen=True)
class _Content:
    """What makes a row's text, or has its token ids. key: the settings. columns: all that are read. identity: what
    determines the content, as plain JSON values. add: gives a document the content of a row; raises ValueError for a
    bad row. info_schema: columns that it adds to documents."""

    key: str
    columns: Collection[str]
    identity: Mapping[str, object]
    add: Callable[[Document, Row], Document]
    info_schema: pa.Schema = _NO_COLUMNS


def _content(config: HfData) -> _Content:
    """The content of `data.tokens` or `data.text`. Raises ConfigError."""
    if config.tokens:
        ids = partial(with_tokens, column=config.tokens)
        return _Content("tokens", [config.tokens], {"tokens": config.tokens}, ids)
    try:
        template = TextTemplate(config.text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"data.text={config.text!r:.300} is no jinja template: {error}. Correct it.") from error

    def add(document: Document, row: Row) -> Document:
        try:
            return replace(document, text=template(row))
        except RenderError as error:
            raise ValueError(f"data.text does not render: {error}") from error

    return _Content("text", template.columns, {"text": config.text}, add)


def _chats(config: HfData, tokenizer: TextTokenizer, are_prompts: bool, is_padded: bool) -> _Content:
    """The content of `data.messages`: texts with labels and `n_dropped`, unless they are prompts. is_padded: as in
    `Conversations`. Raises ConfigError."""
    forms = TemplateForms.of(tokenizer.chat(config.tools and []), has_tools=config.tools is not None)
    conversations = Conversations(config.messages, config.tools, config.roles, forms, is_padded=is_padded)
    has_warned = False

    def add(document: Document, row: Row) -> Document:
        nonlocal has_warned
        messages, tools = conversations.messages(row), conversations.tools(row)
        template = tokenizer.chat(tools)
        if are_prompts:
            return replace(document, text=template.render(messages, tools=tools, add_generation_prompt=True))
        chat = template.render_labelled(messages, tools=tools, add_generation_prompt=False)
        if chat.dropped and not has_warned:
            has_warned = True
            log.warning(
                "%s row %d: the chat template leaves out %d characters of the conversation. The documents' n_dropped "
                "counts them; data.template_kwargs may change that",
                *(document.source, document.index, chat.dropped),
            )
        info = {**document.info, "n_dropped": chat.dropped}
        return replace(document, text=chat.text, labels=chat.labels, info=info)

    kind = {"add_generation_prompt": True} if are_prompts else {"labels": list(LABELS)}
    identity = {**conversations.identity, **tokenizer.chat_identity(), **kind}
    added = pa.schema([] if are_prompts else [("n_dropped", pa.int64())])
    return _Content("messages, data.tools", conversations.columns, identity, add, added)


def _as_text(column: str, value: Any) -> str | None:
    """Strings and dates as they are, null as None, all others as JSON. Raises ValueError for values that JSON does not
    have."""
    if value is None or isinstance(value, str | datetime.date | datetime.time):
        return value and str(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"{column!r} cannot be stored as text: {error}") from error


def _open_files(config: HfData) -> tuple[DatasetBuilder, list[InputFile]]:
    """The dataset's builder, and its split's files, named relative to their common directory."""
    path, data_files = os.path.expanduser(config.path), config.data_files
    if data_files is not None:
        data_files = [data_files] if isinstance(data_files, str) else data_files
        data_files = [_as_glob(os.path.expanduser(file), path) for file in data_files]
    builder = open_builder(path, config.subset, split=config.split, data_files=data_files, revision=config.revision)
    addresses = [str(file) for file in builder.config.data_files[config.split]]
    if len({posixpath.isabs(address) for address in addresses}) > 1:
        raise ConfigError("data.data_files has both local files and URLs, expected one kind. Move or copy some.")
    base = posixpath.commonpath([posixpath.dirname(address) for address in addresses])

    def listed(address: str) -> InputFile:
        with input_errors(address):
            filesystem, path = fsspec.core.url_to_fs(address)
            require_readable(filesystem, path, "data.data_files")
            info = repeated(path, lambda: filesystem.info(path))
        return InputFile.listed(filesystem, path, posixpath.relpath(address, base), info)

    return builder, in_parallel(listed, addresses)


def _as_glob(file: str, folder: str) -> str:
    """A pattern of one existing file, even if its path has brackets; other patterns and URLs as they are. folder:
    `data.path`, which may be one with the file."""
    return glob.escape(file) if os.path.isfile(file) or os.path.isfile(os.path.join(folder, file)) else file


def _is_read_here(builder: DatasetBuilder, files: Sequence[InputFile]) -> bool:
    """Whether `rows.py` reads the files as the dataset's card asks for."""
    config = builder.config
    asked = (field for field in fields(config) if field.name not in _SETTINGS)
    return (
        builder.name in ("json", "csv", "text", "parquet")
        and all(getattr(config, field.name) == field.default for field in asked)
        and not any(file.name.endswith(".zip") for file in files)
    )
