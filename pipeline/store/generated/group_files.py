"""The parquet files of groups of generated documents; see `documents.py` for their content."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.keys import stream_prefix
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.io.parquet import decode_parquet, encode_parquet
from pipeline.store.io.parsing import parse_store_json
from pipeline.store.io.problems import Problem, Remedy, reported
from pipeline.store.io.storage import Storage

REMEDY = "Delete this group; the next run generates it again."
ACTIVATIONS = pa.large_binary()
"""The type of a column of activations, by which it is told from the other columns."""

_PREFIX = "_generated/"
_METADATA = b"group"  # key in the parquet schema's metadata: JSON with `next`, `exhausted` and `sha256`
_TYPES = {"document": pa.int64(), "prompt": pa.list_(pa.int32()), "completion": pa.list_(pa.int32())}
_MAX_ROWS = 1 << 20  # documents, and skips


def group_key(stream: int, index: int) -> str:
    """The key of a group, relative to the store."""
    return f"{stream_prefix(_PREFIX, stream)}group-{index:06d}.parquet"


def stored_groups(storage: Storage, stream: int) -> list[int]:
    """The indices of a stream's stored groups, ascending."""
    keys = storage.list_keys(stream_prefix(_PREFIX, stream))
    return sorted(int(match[1]) for key in keys if (match := re.fullmatch(r".*/group-(\d{6,12})\.parquet", key)))


def delete_used_groups(storage: Storage, metadata: StoreMetadata, num_documents: Mapping[int, int]) -> None:
    """Deletes the groups with activations (capture.when=decode) whose documents are all in blocks. num_documents: by
    stream, the number of documents before the one with which the next block begins."""
    size = metadata.data.get("group")
    if metadata.capture.get("when") == "decode" and isinstance(size, int) and size > 0:
        for stream, number in num_documents.items():
            stored = stored_groups(storage, stream)
            storage.delete(group_key(stream, index) for index in stored if index < number // size)


def read_group(storage: Storage, stream: int, index: int) -> pa.Table:
    """The table of a group. Raises StoreInvalid if it is missing or damaged."""
    [table] = storage.read_checked(
        [group_key(stream, index)], lambda key, content: _decode(key, content, stream, index)
    )
    return table


def _decode(key: str, content: bytes | None, stream: int, index: int) -> pa.Table:
    if content is None:
        raise StoreInvalid(f"{key} is missing, but this run needs its documents. Run the same command again.")
    try:
        table = decode_parquet(content, _MAX_ROWS, verify_pages=True)
        state = group_state(table, key)
        _require_types(table)
        digest = _digest(table, {name: value for name, value in state.items() if name != "sha256"}, stream, index)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise StoreInvalid(f"{key} cannot be read: {error}. {REMEDY}") from error
    if state.get("sha256") != digest:
        raise StoreInvalid(f"{key} does not match its own checksum: it was edited, damaged or replaced. {REMEDY}")
    return table


def _require_types(table: pa.Table) -> None:
    """Raises ValueError unless each document has its number, its prompt and its completion."""
    for name, kind in _TYPES.items():
        if [field.type for field in table.schema if field.name == name] != [kind]:
            raise ValueError(f"it has no column {name} of type {kind}")
    documents = table.select(list(_TYPES)).filter(pc.is_valid(table["document"]))
    tokens = [documents[name] for name in ("prompt", "completion")]
    if any(column.null_count or pc.list_flatten(column).null_count for column in tokens):
        raise ValueError("it has documents without tokens")


def group_state(table: pa.Table, subject: str) -> dict[str, Any]:
    """The metadata of a group: `next`, `exhausted`, `sha256`. Raises StoreInvalid."""
    state = parse_store_json((table.schema.metadata or {}).get(_METADATA, b"null"), subject, REMEDY)
    if not isinstance(state, dict) or not {"next", "exhausted"} <= set(state):
        raise StoreInvalid(f"{subject} is not a group of generated documents. {REMEDY}")
    return state


def encode_group(table: pa.Table, state: Mapping[str, Any], stream: int, index: int) -> memoryview:
    """A group's parquet file. Its checksum covers the documents, activations, the state, the stream and the index.
    Raises StoreInvalid for more rows than readers accept."""
    if table.num_rows > _MAX_ROWS:
        raise StoreInvalid(
            f"{group_key(stream, index)} has {table.num_rows:,} rows, expected at most {_MAX_ROWS:,}: "
            "data.on_error=skip leaves out too many rows of the input. Set data that has fewer of these."
        )
    state = {**state, "sha256": _digest(table, state, stream, index)}
    has_activations = any(_activation_columns(table))
    return encode_parquet(
        table.replace_schema_metadata({_METADATA: json.dumps(state)}),
        "none" if has_activations else "zstd",  # it would take long, and gain little
        write_page_checksum=True,
        write_batch_size=1 if has_activations else None,  # values in memory before they are written as a page
    )


def _digest(table: pa.Table, state: Mapping[str, Any], stream: int, index: int) -> str:
    activations = list(_activation_columns(table))
    content = [stream, index, state, table.column_names, table.drop_columns(activations).to_pylist()]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
    for name in activations:
        for value in table[name]:
            digest.update(value.as_buffer() or b"")
    return digest.hexdigest()


def _activation_columns(table: pa.Table) -> Iterator[str]:
    return (field.name for field in table.schema if field.type == ACTIVATIONS)


def check_groups(storage: Storage, stream: int) -> list[Problem]:
    """Finds the groups of a stream that cannot be read. A missing one is generated again when it is needed."""
    problems: list[Problem] = []
    for index in stored_groups(storage, stream):
        with reported(problems, group_key(stream, index), Remedy.discard):
            read_group(storage, stream, index)
    return problems
