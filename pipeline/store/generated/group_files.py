"""The parquet files of groups of generated documents; see `documents.py` for their content."""

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.keys import stream_prefix
from pipeline.store.generated.group_keys import GENERATED_PREFIX, group_key
from pipeline.store.generated.kept_activations import KeptGroup, check_kept, documents_digest
from pipeline.store.io.parquet import decode_parquet
from pipeline.store.io.parsing import parse_store_json
from pipeline.store.io.problems import Problem, Remedy
from pipeline.store.io.storage import Storage

_METADATA = b"group"  # key in the parquet schema's metadata: JSON with `next`, `exhausted` and `sha256`
_TYPES = {"document": pa.int64(), "prompt": pa.list_(pa.int32()), "completion": pa.list_(pa.int32())}
_MAX_ROWS = 1 << 20  # documents, and skips
_REMEDY = "Delete this group and all later groups of its stream; the next run generates them again."


def stored_groups(storage: Storage, stream: int) -> list[str]:
    """The keys of a stream's groups. Raises StoreInvalid unless they are 0, 1, 2, ..."""
    stored = storage.list_keys(stream_prefix(GENERATED_PREFIX, stream))
    keys = [key for key in stored if re.fullmatch(r".*/group-\d{6,}\.parquet", key)]
    keys.sort(key=lambda key: (len(key), key))
    for index, key in enumerate(keys):
        if key != group_key(stream, index):
            raise StoreInvalid(f"the store has {key}, but no {group_key(stream, index)}. {_REMEDY}")
    return keys


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
        raise StoreInvalid(f"{key} cannot be read: {error}. {_REMEDY}") from error
    if state.get("sha256") != digest:
        raise StoreInvalid(f"{key} does not match its own checksum: it was edited, damaged or replaced. {_REMEDY}")
    return table


def _require_types(table: pa.Table) -> None:
    """Raises ValueError unless each document has its number, its prompt and its completion."""
    for name, kind in _TYPES.items():
        if [field.type for field in table.schema if field.name == name] != [kind]:
            raise ValueError(f"it has no column {name} of type {kind}")
    documents = table.filter(pc.is_valid(table["document"]))
    tokens = [documents[name] for name in ("prompt", "completion")]
    if any(column.null_count or pc.list_flatten(column).null_count for column in tokens):
        raise ValueError("it has documents without tokens")


def group_state(table: pa.Table, subject: str) -> dict[str, Any]:
    """The metadata of a group: `next`, `exhausted`, `sha256`. Raises StoreInvalid."""
    state = parse_store_json((table.schema.metadata or {}).get(_METADATA, b"null"), subject, _REMEDY)
    if not isinstance(state, dict) or not {"next", "exhausted"} <= set(state):
        raise StoreInvalid(f"{subject} is not a group of generated documents. {_REMEDY}")
    return state


def encode_group(table: pa.Table, state: Mapping[str, Any], stream: int, index: int) -> bytes:
    """A group's parquet file. Its checksum covers the documents, the state, the stream and the index."""
    state = {**state, "sha256": _digest(table, state, stream, index)}
    sink = io.BytesIO()
    table = table.replace_schema_metadata({_METADATA: json.dumps(state)})
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def _digest(table: pa.Table, state: Mapping[str, Any], stream: int, index: int) -> str:
    content = [stream, index, state, table.column_names, table.to_pylist()]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def check_groups(
    storage: Storage, stream: int, table: pa.Table | None, token_bytes: Mapping[str, int]
) -> Iterator[Problem]:
    """Checks a stream's groups, if it has any. Finds groups that are missing or cannot be read, documents whose lengths
    differ from those in the stream's document tables, and damaged kept activations.

    table: the document tables; None to skip that comparison. token_bytes: bytes of kept activations per token, by array
    name.
    """
    columns = ("document", "n_prompt", "n_completion")
    expected = {} if table is None else {row["document"]: row for row in table.select(columns).to_pylist()}
    try:
        keys = stored_groups(storage, stream)
    except StoreError as error:
        yield Problem(stream_prefix(GENERATED_PREFIX, stream), str(error), Remedy.regenerate)
        return
    for index, key in enumerate(keys):
        try:
            group = read_group(storage, stream, index)
        except StoreError as error:
            yield Problem(key, str(error), Remedy.regenerate)
            continue
        documents = [row["prompt"] + row["completion"] for row in _documents(group)]
        kept = KeptGroup(stream, index, documents_digest(documents))
        for damaged_key, what in check_kept(storage, kept, sum(map(len, documents)), token_bytes):
            yield Problem(damaged_key, what, Remedy.regenerate_kept)
        for row in _documents(group):
            sizes = (row["document"], len(row["prompt"]), len(row["completion"]))
            row_lengths = dict(zip(columns, sizes, strict=True))
            if row_lengths != expected.get(row["document"], row_lengths):
                what = f"has {row_lengths}, but the document table has {expected[row['document']]}"
                yield Problem(key, what, Remedy.regenerate)


def _documents(group: pa.Table) -> list[dict[str, Any]]:
    """The rows of the documents that were not skipped."""
    return group.filter(pc.is_valid(group["document"])).to_pylist()
