"""Generated documents: a stream's prompts with their completions, in groups of one parquet file each.

Groups 0, 1, 2, ... contain a stream's documents in order, `size` documents each. The last group has fewer or none, and
marks the end of the stream. A group is written as a whole, after the previous groups, and never replaced: if two runs
generate a group, the first one that is stored stays. With capture.when=decode it includes the activations that were
captured during decoding, so that they always belong to its completions.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  registers "bfloat16" with NumPy
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float

from pipeline.core.errors import StoreInvalid
from pipeline.data.documents import STREAM_START, Cursor, Document, SkippedDocument
from pipeline.data.text.contexts import NOTHING
from pipeline.data.tokenised import TokenisedDocument
from pipeline.store.format.keys import stream_prefix
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.io.parquet import decode_parquet, encode_parquet
from pipeline.store.io.parsing import parse_store_json
from pipeline.store.io.storage import Storage

# The columns of a generated document, in addition to those of its source.
COMPLETION_SCHEMA = pa.schema(
    [
        ("n_prompt", pa.int64()),
        ("n_prompt_cut", pa.int64()),  # how many tokens were cut from the prompt's beginning
        ("n_completion", pa.int64()),
        ("finish_reason", pa.string()),  # stop: the last token is an end token; length: the maximum length was reached
        ("sampling_seed", pa.int64()),
    ]
)
SAMPLE_SCHEMA = pa.schema([("sample", pa.int64())])
"""With `data.samples` or `data.beams`: which of its prompt's completions a document has, from 0."""
SCORE_SCHEMA = pa.schema([("score", pa.float64())])
"""With `data.beams`: the mean log-probability of the completion's tokens."""

_GROUP_SCHEMA = pa.schema(
    [
        ("document", pa.int64()),  # the document's number; null if it was skipped
        ("id", pa.string()),
        ("source", pa.string()),
        ("index", pa.int64()),
        ("shard", pa.int64()),  # the index of the document's source shard among the stream's
        ("prompt", pa.list_(pa.int32())),
        ("completion", pa.list_(pa.int32())),
        ("skipped", pa.string()),  # why the document was skipped
        ("skipped_rows", pa.int64()),  # the number of rows that this skip stands for; null if it is unknown
    ]
)
_ACTIVATIONS_PREFIX = "activations."  # of columns, followed by the array's name
_ACTIVATIONS = pa.large_binary()  # the type of these columns, and of no other
_PREFIX = "_generated/"
_METADATA = b"group"  # key in the parquet schema's metadata: JSON with `next`, `exhausted` and `sha256`
_MAX_ROWS = 1 << 20  # documents, and skips
_REMEDY = "Delete this group; the next run generates it again."
RESERVED_COLUMNS = frozenset(
    [*_GROUP_SCHEMA.names, *COMPLETION_SCHEMA.names, *SAMPLE_SCHEMA.names, *SCORE_SCHEMA.names]
)
"""Which columns a source of prompts cannot have."""


@dataclass(frozen=True)
class Group:
    """A group of a stream's documents. A document's tokens are the prompt followed by the completion; its `info` has
    the columns of `COMPLETION_SCHEMA`.

    next: the cursor at which the next group's prompts begin. exhausted: the stream has no more documents. activations:
    by index in `items`, those to be written for the document's tokens, by array name.
    """

    index: int
    items: list[TokenisedDocument | SkippedDocument]
    next: Cursor
    exhausted: bool
    activations: dict[int, Mapping[str, Float[np.ndarray, "n D"]]] = field(default_factory=dict)

    @property
    def documents(self) -> list[TokenisedDocument]:
        return [item for item in self.items if isinstance(item, TokenisedDocument)]


class GeneratedGroups:
    """The groups of one stream of a store. size: documents per group. info_schema: the columns of `Document.info`."""

    def __init__(self, storage: Storage, *, stream: int, num_streams: int, size: int, info_schema: pa.Schema) -> None:
        self.stream = stream
        self.size = size
        self.info_schema = info_schema
        self._storage = storage
        self._num_streams = num_streams
        self._schema = pa.unify_schemas([_GROUP_SCHEMA, info_schema])

    def stored(self) -> list[int]:
        """The indices of the stored groups, ascending. After a run was killed, or groups were deleted, some may be
        missing, which are generated again if they are needed."""
        return stored_groups(self._storage, self.stream)

    def read(self, index: int) -> Group:
        """Reads a group, without activations. Raises StoreInvalid if it is missing or damaged."""
        table, state = self._table(index, self._schema.names)
        items = list(map(self._item, table.to_pylist()))
        return Group(index, items, Cursor(**state["next"]), state["exhausted"])

    def read_activations(
        self, index: int, widths: Mapping[str, int], dtype: str
    ) -> dict[int, dict[str, Float[np.ndarray, "n D"]]]:
        """The activations of a group's documents: by the document's number in its stream, then by array name.

        widths: by array name. dtype: in which they were captured. Raises StoreInvalid if the group is missing or
        damaged, or has no such activations.
        """
        columns = {name: f"{_ACTIVATIONS_PREFIX}{name}" for name in widths}
        table, _ = self._table(index, ("document", "prompt", "completion", *columns.values()))
        if wrong := [column for column in columns.values() if table.schema.field(column).type != _ACTIVATIONS]:
            raise StoreInvalid(f"{group_key(self.stream, index)} has a column {wrong[0]} of another type. {_REMEDY}")
        activations = {}
        for row, document in enumerate(table.drop_columns(list(columns.values())).to_pylist()):
            if document["document"] is not None:
                size = len(document["prompt"]) + len(document["completion"])
                contents = {name: table[column][row].as_buffer() or b"" for name, column in columns.items()}
                try:
                    activations[self._ordinal(document)] = {
                        name: np.frombuffer(content, dtype).reshape(size, widths[name])
                        for name, content in contents.items()
                    }
                except ValueError as error:
                    what = f"activations that do not fit its {size} tokens: {error}"
                    raise StoreInvalid(f"{group_key(self.stream, index)} has {what}. {_REMEDY}") from error
        return activations

    def write(self, group: Group) -> Group:
        """Writes a group durably, unless the store has it. Returns the group that the store has now."""
        rows = [self._row(item) for item in group.items]
        columns = {name: [row.get(name) for row in rows] for name in self._schema.names}
        table = pa.table(columns, schema=self._schema)
        for name in next(iter(group.activations.values()), {}):
            arrays = (group.activations[row][name] if row in group.activations else None for row in range(len(rows)))
            contents = [None if array is None else np.ascontiguousarray(array).view(np.uint8).data for array in arrays]
            table = table.append_column(f"{_ACTIVATIONS_PREFIX}{name}", pa.array(contents, _ACTIVATIONS))
        state = {"next": group.next.to_json(), "exhausted": group.exhausted}
        content = encode_group(table, state, self.stream, group.index)
        is_new = self._storage.put(group_key(self.stream, group.index), content)
        return group if is_new else self.read(group.index)

    def _table(self, index: int, columns: Sequence[str]) -> tuple[pa.Table, dict[str, Any]]:
        table, state = read_group(self._storage, self.stream, index)
        if missing := [name for name in columns if name not in table.column_names]:
            raise StoreInvalid(f"{group_key(self.stream, index)} has no column {missing[0]}. {_REMEDY}")
        return table.select(columns), state

    def _ordinal(self, row: Mapping[str, Any]) -> int:
        return (row["document"] - self.stream) // self._num_streams

    def _row(self, item: TokenisedDocument | SkippedDocument) -> dict[str, object]:
        if isinstance(item, SkippedDocument):
            skip = {"skipped": item.reason, "skipped_rows": item.rows}
            return {"source": item.source, "index": item.index, **skip}
        document, size = item.document, item.document.info["n_prompt"]
        return {
            "document": item.cursor.ordinal * self._num_streams + self.stream,
            "id": document.id,
            "source": document.source,
            "index": document.index,
            "shard": item.cursor.shard,
            "prompt": item.tokens[:size],
            "completion": item.tokens[size:],
            **document.info,
        }

    def _item(self, row: dict) -> TokenisedDocument | SkippedDocument:
        if row["skipped"] is not None:
            return SkippedDocument(row["source"], row["index"], row["skipped"], row["skipped_rows"])
        info = {name: row[name] for name in self.info_schema.names}
        document = Document(row["id"], "", row["source"], row["index"], info)
        cursor = Cursor(row["shard"], row["index"], 0, self._ordinal(row))
        return TokenisedDocument(document, np.array(row["prompt"] + row["completion"], np.int32), cursor)


class GeneratedDocuments:
    """A stream's generated documents, as `StreamDocuments` for `TokenStream`."""

    added = NOTHING

    def __init__(self, groups: GeneratedGroups, num_shards: int) -> None:
        self.num_shards = num_shards
        self.info_schema = groups.info_schema
        self._groups = groups

    def read(
        self, start: Cursor, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[TokenisedDocument | SkippedDocument]:
        """See `StreamDocuments`. Raises StoreInvalid if a group is missing or damaged."""
        index = start.ordinal // self._groups.size
        started = start == STREAM_START  # documents skipped before the cursor's document belong to an earlier block
        while not should_stop():
            group = self._groups.read(index)
            for item in group.items:
                started = started or (isinstance(item, TokenisedDocument) and item.cursor.ordinal == start.ordinal)
                if started:
                    yield item
            if group.exhausted:
                return
            index += 1


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


def read_group(storage: Storage, stream: int, index: int) -> tuple[pa.Table, dict[str, Any]]:
    """The table of a group, and its `next` and `exhausted`. Raises StoreInvalid if it is missing or damaged."""

    def decode(key: str, content: bytes | None) -> tuple[pa.Table, dict[str, Any]]:
        if content is None:
            raise StoreInvalid(f"{key} is missing, but this run needs its documents. Run the same command again.")
        try:
            table = decode_parquet(content, _MAX_ROWS)
            state = parse_store_json((table.schema.metadata or {}).get(_METADATA, b"null"), key, _REMEDY)
            if not isinstance(state, dict) or not {"next", "exhausted"} <= set(state):
                raise ValueError("it is not a group of generated documents")
            _require_types(table)
            digest = state.pop("sha256", None)
            if digest != _digest(table, state, stream, index):
                raise ValueError("it does not match its own checksum: it was edited, damaged or replaced")
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise StoreInvalid(f"{key} cannot be read: {error}. {_REMEDY}") from error
        return table, state

    return next(storage.read_checked([group_key(stream, index)], decode))


def _require_types(table: pa.Table) -> None:
    """Raises ValueError unless each document has its number, its prompt and its completion."""
    types = {name: _GROUP_SCHEMA.field(name).type for name in ("document", "prompt", "completion")}
    for name, kind in types.items():
        if [field.type for field in table.schema if field.name == name] != [kind]:
            raise ValueError(f"it has no column {name} of type {kind}")
    documents = table.select(list(types)).filter(pc.is_valid(table["document"]))
    tokens = [documents[name] for name in ("prompt", "completion")]
    if any(column.null_count or pc.list_flatten(column).null_count for column in tokens):
        raise ValueError("it has documents without tokens")


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
    return (field.name for field in table.schema if field.type == _ACTIVATIONS)
