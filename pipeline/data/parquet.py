"""Documents from parquet files with FineWeb's columns: local, remote, or in a Hub dataset.

A source shard is a file, or with `row_groups_per_shard` some of its row groups.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.choices import OnError
from pipeline.config.schema import ParquetData
from pipeline.core.errors import ConfigError, InputError
from pipeline.data.documents import Document, SkippedDocument, is_ids, token_columns, with_tokens
from pipeline.data.files import InputFile, find_files, hub_data_set, in_parallel
from pipeline.data.manifest import FileEntry, MakeManifest, Manifest, file_entries, make_alone
from pipeline.data.rows import ParquetDamage, Row, Types, documents_of_rows, parquet_rows, read_footer

# The columns of HuggingFaceFW/fineweb and fineweb-edu other than text and id, with their types.
_INFO_TYPES = {
    "dump": pa.string(),
    "url": pa.string(),
    "date": pa.string(),
    "file_path": pa.string(),
    "language": pa.string(),
    "language_score": pa.float64(),
    "token_count": pa.int64(),
    "score": pa.float64(),
    "int_score": pa.int64(),
}

_TEXT_TYPES = {pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()}


@dataclass(frozen=True, slots=True)
class _Shard:
    """Row groups `first` .. `stop` of one file; `stop` None is the end."""

    file: InputFile
    first: int = 0
    stop: int | None = None

    @property
    def name(self) -> str:
        return self.file.name if self.stop is None else f"{self.file.name}[{self.first}:{self.stop}]"


class ParquetSource:
    """Source shards sorted by file name. Only the columns that are used are read.

    With `on_error=skip`, one skip stands for the rows of a row group from the first damaged one on.
    """

    shards: tuple[str, ...]
    info_schema: pa.Schema

    def __init__(self, config: ParquetData, agree: Callable[[MakeManifest], Manifest] = make_alone) -> None:
        """agree: as in `open_source`."""
        self._config = config
        self._manifest = manifest = agree(partial(make_manifest, config))
        self._shards = [
            shard
            for file, entry in zip(manifest.input_files(_path(config)), manifest.files, strict=True)
            for shard in _file_shards(file, entry, config.row_groups_per_shard)
        ]
        self.shards = tuple(shard.name for shard in self._shards)
        used = {config.tokens or config.text_column, config.id_column}
        names = [name for name in manifest.info_columns if name not in used]
        self.info_schema = pa.schema([(name, _INFO_TYPES[name]) for name in names])

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        """The shard's documents from row `start` of its file on. Does not read earlier row groups."""
        part = self._shards[shard]
        rows = parquet_rows(part.file, start, partial(self._columns, part.file), slice(part.first, part.stop))
        document = partial(self._document, part.file.name)
        return documents_of_rows(rows, document, part.file.name, part.file.path, self._config.on_error)

    def _document(self, file: str, index: int, row: Row) -> Document:
        """Raises ValueError for a bad row."""
        config = self._config
        for name in filter(None, (None if config.tokens else config.text_column, config.id_column)):
            if row[name] in (None, ""):
                raise ValueError(f"{name!r} is {'null' if row[name] is None else 'empty'}")
        identity = row[config.id_column] if config.id_column else f"{file}#{index}"
        info = {name: row.get(name) for name in self.info_schema.names}
        if config.tokens:
            return with_tokens(Document(str(identity), "", file, index, info), row, config.tokens)
        return Document(str(identity), row[config.text_column], file, index, info)

    def fingerprint(self) -> dict[str, object]:
        """The columns, and a digest of the files' names and sizes."""
        config = self._config
        return {
            "source": "parquet",
            **({"tokens": config.tokens} if config.tokens else {"text_column": config.text_column}),
            "id_column": config.id_column,
            "row_groups_per_shard": config.row_groups_per_shard,
            "num_bytes": sum(file.size for file in self._manifest.files),
            **self._manifest.identity(),
        }

    def _columns(self, file: InputFile, parquet: pq.ParquetFile) -> Types:
        """The columns to read of a file. Raises InputError if it lacks one."""
        config, names = self._config, parquet.schema_arrow.names
        _check_columns(config, file, parquet.schema_arrow)
        info = {name: _INFO_TYPES[name] for name in self.info_schema.names if name in names}
        content = token_columns(config.tokens, names) if config.tokens else [config.text_column]
        return dict.fromkeys(filter(None, (*content, config.id_column))) | info


def make_manifest(config: ParquetData) -> Manifest:
    """Lists the files, reads the schema of the first one and, with `row_groups_per_shard`, every footer.

    Raises InputError if there are no files, for a missing column, and for a damaged footer unless these are skipped;
    PipelineError for a file that cannot be reached.
    """
    files = find_files(_path(config), ".parquet")
    entries = file_entries(files)
    if config.row_groups_per_shard is not None:

        def with_footer(file: InputFile, entry: FileEntry) -> FileEntry:
            footer = _footer(file, config.on_error)
            return replace(entry, row_groups=footer.num_row_groups, rows=footer.num_rows) if footer else entry

        entries = tuple(in_parallel(with_footer, files, entries))
    for file in files:  # if damage is skipped, the columns are those of the first file with a readable footer
        if footer := _footer(file, OnError.fail if file is files[-1] else config.on_error):
            break
    schema = footer.schema.to_arrow_schema()
    _check_columns(config, file, schema)
    info_columns = tuple(name for name in schema.names if name in _INFO_TYPES)
    return Manifest(entries, file.path.removesuffix(file.name), info_columns)


def _footer(file: InputFile, on_error: OnError) -> pq.FileMetaData | None:
    """A file's footer; None if it is damaged and may be skipped."""
    try:
        return read_footer(file)
    except ParquetDamage:
        if on_error is OnError.fail:
            raise
        return None


def _check_columns(config: ParquetData, file: InputFile, schema: pa.Schema) -> None:
    content = "tokens" if config.tokens else "text_column"
    for name in (getattr(config, content), config.id_column, *_INFO_TYPES):
        if (count := schema.names.count(name)) > 1:
            raise InputError(f"{file.path} has {count} columns {name!r}, expected one. Rename or remove the others.")
    for key, name in ((content, getattr(config, content)), ("id_column", config.id_column)):
        if name is None:
            continue
        if name not in schema.names:
            remedy = ", or to null to use file name and row number as ids" if key == "id_column" else ""
            raise InputError(
                f"{file.path} has no column {name!r}, only {', '.join(map(repr, schema.names))}. "
                f"Set data.{key} to one of them{remedy}."
            )
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        is_number = key == "id_column" and pa.types.is_integer(kind)
        if not (is_ids(kind) if key == "tokens" else is_number or kind in _TEXT_TYPES):
            expected = "lists of integers" if key == "tokens" else "strings"
            raise InputError(f"{file.path}: column {name!r} is {kind}, expected {expected}. Set data.{key}.")


def _file_shards(file: InputFile, entry: FileEntry, row_groups_per_shard: int | None) -> list[_Shard]:
    """A file's source shards. A file with a damaged footer is one source shard, so that it is skipped once."""
    if row_groups_per_shard is None or entry.row_groups is None:
        return [_Shard(file)]
    return [
        _Shard(file, first, min(first + row_groups_per_shard, entry.row_groups))
        for first in range(0, entry.row_groups, row_groups_per_shard)
    ]


def _path(config: ParquetData) -> str:
    """The files' path, of a Hub data set at `data.revision`."""
    repo = hub_data_set(config.path)
    if config.revision and not repo:
        raise ConfigError(
            f"data.revision is {config.revision}, but data.path={config.path} is no data set of the Hub without a "
            "revision. Set only one of them."
        )
    return config.path.replace(repo, f"{repo}@{config.revision}", 1) if repo and config.revision else config.path
