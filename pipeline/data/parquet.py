"""Documents from parquet files with FineWeb's columns: local, remote, or a Hub data set's.

A source shard is a file, or with `row_groups_per_shard` some of its row groups. Documents are named by file and row.
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
from pipeline.core.errors import ConfigError, InputError
from pipeline.data.documents import Document, SkippedDocument
from pipeline.data.files import InputFile, find_files
from pipeline.data.manifest import FileEntry, KnownFooters, Manifest, require_unchanged
from pipeline.data.parquet_file import ParquetDamage, open_parquet, open_readers, read_row_groups

_PART_BYTES = 16 << 20
_FOOTER_THREADS = 16  # on remote storage each footer is a round trip

# The columns of HuggingFaceFW/fineweb and fineweb-edu beside the text and the id, with the types they have there.
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
    """Row groups of one file; `stop` None means to the end."""

    file: InputFile
    entry: FileEntry
    first: int = 0
    stop: int | None = None

    @property
    def name(self) -> str:
        return self.file.name if self.stop is None else f"{self.file.name}[{self.first}:{self.stop}]"


class ParquetSource:
    """Source shards in the order of the files' names. Only the columns that are used are read.

    With `on_error=skip` one skip stands for all rows of a source shard from where its file is damaged.
    """

    shards: tuple[str, ...]
    info_schema: pa.Schema

    def __init__(self, config: ParquetData, manifest: Manifest | None = None) -> None:
        """`manifest` is what `make_manifest` returned, here or in another process; None: it is made."""
        self._config = config
        manifest = manifest or make_manifest(config)
        self._files = manifest.input_files(_path(config))
        self._shards = [
            shard
            for file, entry in zip(self._files, manifest.files, strict=True)
            for shard in _shards_of(file, entry, config.row_groups_per_shard)
        ]
        self.shards = tuple(shard.name for shard in self._shards)
        names = [name for name in manifest.info_columns if name not in (config.text_column, config.id_column)]
        self.info_schema = pa.schema([(name, _INFO_TYPES[name]) for name in names])

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        """The shard's documents from its file's row `start` on; row groups before it are not read."""
        place = self._shards[shard]
        try:
            with open_readers(place.file) as readers:
                parquet, _ = readers
                require_unchanged(place.file, place.entry, parquet.num_row_groups, parquet.metadata.num_rows)
                _check_columns(self._config, place.file, parquet.schema_arrow)
                sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
                begins = [0, *accumulate(sizes)]
                groups = [
                    (group, begins[group])
                    for group in range(parquet.num_row_groups)[place.first : place.stop]
                    if start < begins[group + 1]
                ]
                for batches in read_row_groups(place.file, readers, groups, self._columns(parquet)):
                    for index, batch in batches:
                        yield from self._batch(place.file, batch, index, start)
        except ParquetDamage as damage:
            if self._config.on_error is OnError.fail:
                raise
            yield SkippedDocument(place.file.name, max(damage.row, start), damage.reason)

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
        """The documents of a batch, whose first row is the file's row `index`, from the file's row `start` on."""
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
        """A column beside the text, as FineWeb has it. Files that lack it give nulls."""
        if field.name not in batch.schema.names:
            return [None] * batch.num_rows
        try:
            return _values(batch[field.name].cast(field.type))
        except pa.ArrowException as error:
            raise InputError(
                f"{file.path}: column {field.name!r} is {batch[field.name].type}, which does not become {field.type}, "
                f"its type in FineWeb: {error}. Rename or convert the column."
            ) from error


def make_manifest(config: ParquetData, known: KnownFooters = MappingProxyType({})) -> Manifest:
    """Lists the files and reads the first one's schema, and with `row_groups_per_shard` every footer that is not
    `known`.

    Raises InputError for no file, a missing column or, unless such are skipped, a damaged footer, and PipelineError for
    what cannot be reached.
    """
    if config.row_groups_per_shard is not None and config.row_groups_per_shard < 1:
        raise ConfigError(f"data.row_groups_per_shard = {config.row_groups_per_shard}, expected at least 1 or null.")
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
    """The schema of the first file, or where damage is skipped, of the first whose footer is readable."""
    for file in files:
        try:
            with open_parquet(file) as parquet:
                return file, parquet.schema_arrow
        except ParquetDamage:
            if on_error is OnError.fail or file is files[-1]:
                raise
    raise AssertionError("find_files gives at least one file")


def _check_columns(config: ParquetData, file: InputFile, schema: pa.Schema) -> None:
    for name in (config.text_column, config.id_column, *_INFO_TYPES):
        if (count := schema.names.count(name)) > 1:
            raise InputError(f"{file.path} has {count} columns {name!r}, expected one. Rename or remove the others.")
    for key, name in (("text_column", config.text_column), ("id_column", config.id_column)):
        if name is None:
            continue
        if name not in schema.names:
            remedy = ", or to null for ids of file name and row" if key == "id_column" else ""
            raise InputError(
                f"{file.path} has no column {name!r}, only {', '.join(schema.names)}. "
                f"Set data.{key} to one of them{remedy}."
            )
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        integer_id = key == "id_column" and pa.types.is_integer(kind)
        if not (integer_id or pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_binary(kind)):
            raise InputError(f"{file.path}: column {name!r} is {kind}, expected strings. Set data.{key}.")


def _shards_of(file: InputFile, entry: FileEntry, row_groups_per_shard: int | None) -> list[_Shard]:
    """A file that is to be skipped for its footer is one source shard, so that the skip is recorded once."""
    if row_groups_per_shard is None or entry.row_groups is None:
        return [_Shard(file, entry)]
    return [
        _Shard(file, entry, first, min(first + row_groups_per_shard, entry.row_groups))
        for first in range(0, entry.row_groups, row_groups_per_shard)
    ]


def _path(config: ParquetData) -> str:
    return config.path if config.path is not None else _hub_path(config)


def _hub_path(config: ParquetData) -> str:
    revision = f"@{config.revision}" if config.revision else ""
    return f"hf://datasets/{config.repo}{revision}/{config.subset.strip('/')}/*.parquet"


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in parts that are few bytes or one row: rows become Python's strings part by part."""
    if batch.num_rows <= 1 or batch.nbytes <= _PART_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half))
    yield from _parts(batch.slice(half))


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _values(column: pa.Array) -> list[str | bytes | int | float | None]:
    """Python values; the raw bytes of all strings when one of them is not UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return column.cast(pa.large_binary()).to_pylist()


def _string(column: str, value: str | bytes | int | None) -> str:
    """The value as text. Raises ValueError saying what is wrong with it."""
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
