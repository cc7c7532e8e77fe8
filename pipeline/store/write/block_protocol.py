"""How a block becomes part of a store: the requests, in order, and what their answers mean.

Every object is put if absent, the record last, and none is ever replaced. If an object exists already, which another
process or an earlier run of this one may have written with other rounding, its values are adopted. So the record
describes what is stored, whoever wrote it; `StoreWriter` carries the requests out.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.layout import ArraySpec, StoreLayout
from pipeline.store.format.statistics import STATISTICS_PREFIX, decode_statistics, statistics_key
from pipeline.store.format.tables import TABLES_PREFIX, table_key
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.parquet import decode_parquet, decode_table_of, encode_table, table_digest
from pipeline.store.io.shards import Buffer, ShardFormat, decode_shard, encode_shard, values_digest

_MAX_DOCUMENTS = 1 << 32  # of a block

T = TypeVar("T")

_OTHER_CONTENT = (
    "which another run has written with different content. Use that run's configuration and kind of device; or, while "
    "no job runs, delete what is not committed: pipeline.verify verify.repair=true."
)


# Of an object to be put: returns its parts and, of a store shard, its chunks' checksums.
Encode = Callable[[], tuple[Sequence[Buffer], bytes]]


class PutAnswer(NamedTuple):
    """is_new: whether the object was written now. checksums: of the content that was to be written."""

    is_new: bool
    checksums: bytes


class Objects(Protocol):
    """Carries out requests. Raises StoreError."""

    def put(self, puts: Mapping[str, Encode]) -> Sequence[PutAnswer]:
        """Puts objects, by key, if absent, perhaps concurrently. The answers are in the same order."""

    def read(self, key: str, check: Callable[[str, bytes | None], T]) -> T:
        """The result of `check(key, content)`, which raises StoreInvalid if the object is damaged, or missing (the
        content is None)."""


Recent = tuple[tuple[int, ...], ...]  # see `CommitRecord`


@dataclass(frozen=True)
class NewBlock:
    """A block to write.

    record: without what the writer sets. arrays: every array by name, [R, ...]. Adopted values are copied into them.
    derive: called once, when all arrays are stored, with the names of those whose values were adopted. Returns the
    files that follow from the arrays, by key: statistics and indexes by feature; and the record's `recent`.
    """

    record: CommitRecord
    arrays: Mapping[str, np.ndarray]
    table: pa.Table
    derive: Callable[[Collection[str]], tuple[Mapping[str, bytes], Recent]]


def write_block(layout: StoreLayout, block: NewBlock, objects: Objects) -> CommitRecord:
    """Writes a block and commits it. Returns the record, which describes what is stored.

    Raises StoreError if an object exists whose integers, documents or counts differ, and StoreInvalid for a damaged
    one.
    """
    digests, adopted = _write_arrays(layout, block, objects)
    files, recent = block.derive(adopted)
    stream, number = block.record.stream, block.record.block
    stored_files = _write_files({table_key(stream, number): encode_table(block.table), **files}, objects)
    documents, statistics = (stored_files.get(key_of(stream, number)) for key_of in (table_key, statistics_key))
    record = replace(
        block.record,
        digests=digests,
        documents_sha256=table_digest(documents),
        statistics_sha256="" if statistics is None else table_digest(statistics),
        recent=recent,
    )
    [put] = objects.put({record.key: lambda: ([record.to_json()], b"")})
    if put.is_new:
        return record
    stored = objects.read(record.key, _parse_record)
    if not stored.is_same_block(record):
        raise StoreError(f"the store has the record {record.key}, {_OTHER_CONTENT}")
    return stored


def _write_arrays(layout: StoreLayout, block: NewBlock, objects: Objects) -> tuple[dict[str, str], set[str]]:
    """Writes the arrays. Returns the digests of the stored ones, and the names of those whose values were adopted."""
    place = block.record.stream, block.record.block
    shards = {
        layout.shard_key(spec, *place, part): (spec, block.arrays[spec.name][layout.part_place(spec, part)])
        for spec in layout.all_arrays
        for part in range(layout.num_parts(spec))
    }
    puts = objects.put(
        {key: partial(encode_shard, values, layout.shard_format(spec)) for key, (spec, values) in shards.items()}
    )
    checksums, adopted = {spec.name: [] for spec in layout.all_arrays}, set()
    for (key, (spec, values)), put in zip(shards.items(), puts, strict=True):
        stored_checksums = put.checksums
        if not put.is_new:  # one after the other, since each takes memory
            stored, stored_checksums = objects.read(key, partial(_decode_shard, layout.shard_format(spec)))
            if stored_checksums != put.checksums:
                if _is_exact(spec):
                    raise StoreError(f"the store has {key}, {_OTHER_CONTENT}")
                values[...] = stored
                adopted.add(spec.name)
        checksums[spec.name].append(stored_checksums)
    return {name: values_digest(parts) for name, parts in checksums.items()}, adopted


def _write_files(contents: Mapping[str, bytes], objects: Objects) -> dict[str, bytes]:
    """Writes the document table, statistics and indexes, by key. Returns what is stored."""
    stored_files = dict(contents)
    puts = objects.put({key: lambda content=content: ([content], b"") for key, content in contents.items()})
    for (key, content), put in zip(contents.items(), puts, strict=True):
        if not put.is_new:
            stored = objects.read(key, _require)
            if stored != content and not _is_same(key, stored, content):
                raise StoreError(f"the store has {key}, {_OTHER_CONTENT}")
            stored_files[key] = stored
    return stored_files


def _is_same(key: str, stored: bytes, content: bytes) -> bool:
    """Whether different bytes say the same."""
    if key.startswith(STATISTICS_PREFIX):
        # Statistics of the same values may be rounded in other ways: those of rows are computed on the devices.
        return _counts(key, stored) == _counts(key, content)
    if key.startswith(TABLES_PREFIX):  # written by another version of the library
        ours = decode_parquet(content, _MAX_DOCUMENTS)
        return decode_table_of(stored, key, table_digest(stored), "the store", ours.num_rows).equals(ours)
    return False


def _is_exact(spec: ArraySpec) -> bool:
    """Whether all writers must have the same values: tokens, and other integers that are not scaled activations."""
    return spec.dtype in ("int16", "int32", "int64")


def _require(key: str, content: bytes | None) -> bytes:
    if content is None:
        raise StoreInvalid(f"{key} was deleted while its block was being written. Run the same command again.")
    return content


def _decode_shard(format: ShardFormat, key: str, content: bytes | None) -> tuple[np.ndarray, bytes]:
    try:
        return decode_shard(_require(key, content), format)
    except ValueError as error:
        raise StoreInvalid(f"{key} is damaged: {error}. {DAMAGE_REMEDY}") from error


def _counts(key: str, content: bytes) -> dict[str, tuple[int, int]]:
    """The numbers of tokens in a file of statistics, by array."""
    statistics = decode_statistics(content, key, table_digest(content))
    return {name: (part.count, part.not_finite) for name, part in statistics.items()}


def _parse_record(key: str, content: bytes | None) -> CommitRecord:
    return CommitRecord.from_json(_require(key, content), key)
