"""Documents from parquet files with FineWeb's columns: local, remote, or in a Hub dataset.

A source shard is a file, or with `row_groups_per_shard` some of its row groups.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.choices import OnError
from pipeline.config.schema import ParquetData
from pipeline.core.errors import InputError
from pipeline.data.documents import Document, SkippedDocument
from pipeline.data.files import InputFile, find_files
from pipeline.data.manifest import FileEntry, KnownFooters, Manifest, require_unchanged
from pipeline.data.parquet_file import ParquetDamage, open_parquet, open_readers, read_row_groups

_PART_BYTES = 16 << 20
_FOOTER_THREADS = 16  # each footer in remote storage takes a round trip

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


@dataclass(frozen=True, slots=True)
class _Shard:
    """Row groups `first` .. `stop` of one file; `stop` None is the end."""

    file: InputFile
    entry: FileEntry
    first: int = 0
    stop: int | None = None

    @property
    def name(self) -> str:
        return self.file.name if self.stop is None else f"{self.file.name}[{self.first}:{self.stop}]"


class ParquetSource:
    """Source shards sorted by file name. Only the columns that are used are read.

    With `on_error=skip`, one skip stands for all rows of a source shard from the first damaged one on.
    """

    shards: tuple[str, ...]
    info_schema: pa.Schema

    def __init__(self, config: ParquetData, manifest: Manifest | None = None) -> None:
        """manifest: from `make_manifest`, in this or a different process; None to call it here."""
        self._config = config
        manifest = manifest or make_manifest(config)
        self._files = manifest.input_files(_path(config))
        self._shards = [
            shard
            for file, entry in zip(self._files, manifest.files, strict=True)
            for shard in _file_shards(file, entry, config.row_groups_per_shard)
        ]
        self.shards = tuple(shard.name for shard in self._shards)
        names = [name for name in manifest.info_columns if name not in (config.text_column, config.id_column)]
        self.info_schema = pa.schema([(name, _INFO_TYPES[name]) for name in names])

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        """The shard's documents from row `start` of its file on. Does not read earlier row groups."""
        row_groups = self._shards[shard]
        file = row_groups.file
        try:
            with open_readers(file) as readers:
                parquet, _ = readers
                require_unchanged(file, row_groups.entry, parquet.num_row_groups, parquet.metadata.num_rows)
                _check_columns(self._config, file, parquet.schema_arrow)
                sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
                begins = [0, *accumulate(sizes)]
                groups = [
                    (group, begins[group])
                    for group in range(parquet.num_row_groups)[row_groups.first : row_groups.stop]
                    if start < begins[group + 1]
                ]
                for batches in read_row_groups(file, readers, groups, self._columns(parquet)):
                    for index, batch in batches:
                        yield from self._batch(file, batch, index, start)
        except ParquetDamage as damage:
            if self._config.on_error is OnError.fail:
                raise
            yield SkippedDocument(file.name, max(damage.row, start), damage.reason)

    def fingerprint(self) -> dict[str, object]:
        """The columns, and a digest of the files' names and sizes."""
        listing = "\n".join(f"{file.name} {file.size}" for file in self._files)
        return {
            "source": "parquet",
            "text_column": self._config.text_column,
            "id_column": self._config.id_column,
            "row_groups_per_shard": self._config.row_groups_per_shard,
            "num_files": len(self._files),
            "num_bytes": sum(file.size for file in self._files),
            "files_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        }

    def _columns(self, parquet: pq.ParquetFile) -> list[str]:
        wanted = [self._config.text_column, self._config.id_column, *self.info_schema.names]
        return [name for name in dict.fromkeys(wanted) if name in parquet.schema_arrow.names]

    def _batch(
        self, file: InputFile, batch: pa.RecordBatch, index: int, start: int
    ) -> Iterator[Document | SkippedDocument]:
        """The documents of a batch from row `start` of the file on. index: the batch's first row in the file."""
        row = max(start, index)
        for part in _parts(batch.slice(row - index)):
            yield from self._documents(file, part, row)
            row += part.num_rows

    def _documents(self, file: InputFile, batch: pa.RecordBatch, index: int) -> Iterator[Document | SkippedDocument]:
        texts = _values(batch[self._config.text_column])
        ids = _values(batch[self._config.id_column]) if self._config.id_column else [None] * len(texts)
        infos = {field.name: self._info(file, batch, field) for field in self.info_schema}
        for row, (text, identity) in enumerate(zip(texts, ids, strict=True), index):
            try:
                text = _string(self._config.text_column, text)
                name = _string(self._config.id_column, identity) if self._config.id_column else f"{file.name}#{row}"
                info = {key: _decoded(key, values[row - index]) for key, values in infos.items()}
            except ValueError as error:
                if self._config.on_error is OnError.fail:
                    raise InputError(
                        f"{file.path} row {row}: {error}. Repair the file or set data.on_error=skip."
                    ) from error
                yield SkippedDocument(file.name, row, str(error))
                continue
            yield Document(name, text, file.name, row, info)

    def _info(self, file: InputFile, batch: pa.RecordBatch, field: pa.Field) -> list[str | bytes | int | float | None]:
        """The values of a column, with its type in FineWeb; nulls if the file lacks it."""
        if field.name not in batch.schema.names:
            return [None] * batch.num_rows
        try:
            return _values(batch[field.name].cast(field.type))
        except pa.ArrowException as error:
            raise InputError(
                f"{file.path}: column {field.name!r} is {batch[field.name].type}, which cannot be converted to "
                f"{field.type}, its type in FineWeb: {error}. Rename or convert the column."
            ) from error


def make_manifest(config: ParquetData, known: KnownFooters = MappingProxyType({})) -> Manifest:
    """Lists the files, reads the schema of the first one and, with `row_groups_per_shard`, every footer that is not
    `known`.

    Raises InputError if there are no files, for a missing column, and for a damaged footer unless these are skipped;
    PipelineError for a file that cannot be reached.
    """
    files = find_files(_path(config), ".parquet")

    def entry(file: InputFile) -> FileEntry:
        if config.row_groups_per_shard is None:
            return FileEntry(file.name, file.size)
        return known.get((file.name, file.size)) or _read_entry(file, config.on_error)

    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        entries = tuple(pool.map(entry, files))
    file, schema = _first_schema(files, config.on_error)
    _check_columns(config, file, schema)
    return Manifest(
        folder=file.path.removesuffix(file.name),
        info_columns=tuple(name for name in schema.names if name in _INFO_TYPES),
        files=entries,
    )


def _read_entry(file: InputFile, on_error: OnError) -> FileEntry:
    try:
        with open_parquet(file) as parquet:
            return FileEntry(file.name, file.size, parquet.num_row_groups, parquet.metadata.num_rows)
    except ParquetDamage:
        if on_error is OnError.fail:
            raise
        return FileEntry(file.name, file.size)


def _first_schema(files: Sequence[InputFile], on_error: OnError) -> tuple[InputFile, pa.Schema]:
    """The first file and its schema; if damage is skipped, the first file with a readable footer."""
    for file in files:
        try:
            with open_parquet(file) as parquet:
                return file, parquet.schema_arrow
        except ParquetDamage:
            if on_error is OnError.fail or file is files[-1]:
                raise
    raise AssertionError("find_files returns at least one file")


def _check_columns(config: ParquetData, file: InputFile, schema: pa.Schema) -> None:
    for name in (config.text_column, config.id_column, *_INFO_TYPES):
        if (count := schema.names.count(name)) > 1:
            raise InputError(f"{file.path} has {count} columns {name!r}, expected one. Rename or remove the others.")
    for key, name in (("text_column", config.text_column), ("id_column", config.id_column)):
        if name is None:
            continue
        if name not in schema.names:
            remedy = ", or to null to use file name and row number as ids" if key == "id_column" else ""
            raise InputError(
                f"{file.path} has no column {name!r}, only {', '.join(schema.names)}. "
                f"Set data.{key} to one of them{remedy}."
            )
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        integer_id = key == "id_column" and pa.types.is_integer(kind)
        if not (integer_id or kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())):
            raise InputError(f"{file.path}: column {name!r} is {kind}, expected strings. Set data.{key}.")


def _file_shards(file: InputFile, entry: FileEntry, row_groups_per_shard: int | None) -> list[_Shard]:
    """A file's source shards. A file with a damaged footer is one source shard, so that it is skipped once."""
    if row_groups_per_shard is None or entry.row_groups is None:
        return [_Shard(file, entry)]
    return [
        _Shard(file, entry, first, min(first + row_groups_per_shard, entry.row_groups))
        for first in range(0, entry.row_groups, row_groups_per_shard)
    ]


def _path(config: ParquetData) -> str:
    if config.path is not None:
        return config.path
    revision = f"@{config.revision}" if config.revision else ""
    return f"hf://datasets/{config.repo}{revision}/{config.subset.strip('/')}/*.parquet"


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in small parts, or of one row, which limits the memory for Python objects."""
    if batch.num_rows <= 1 or batch.nbytes <= _PART_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half))
    yield from _parts(batch.slice(half))


def _values(column: pa.Array) -> list[str | bytes | int | float | None]:
    """The column as Python values; all strings as bytes if one of them is not UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return column.cast(pa.large_binary()).to_pylist()


def _string(column: str, value: str | bytes | int | None) -> str:
    """The value as a string. Raises ValueError, with the reason, if it is null, empty or not UTF-8."""
    if value is None or value in ("", b""):
        raise ValueError(f"{column!r} is {'null' if value is None else 'empty'}")
    return str(_decoded(column, value))


def _decoded(column: str, value: str | bytes | int | float | None) -> str | int | float | None:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{column!r} is not UTF-8: {error}") from error
