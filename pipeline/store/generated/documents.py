"""Generated documents: a stream's prompts with their completions, in groups of one parquet file each.

Groups 0, 1, 2, ... contain a stream's documents in order, `size` documents each. The last group has fewer or none, and
marks the end of the stream. A group is written as a whole, after the previous groups, and never replaced: if two runs
generate a group, the first one that is stored stays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.core.errors import StoreError
from pipeline.data.documents import STREAM_START, Cursor, Document, SkippedDocument
from pipeline.data.tokenised import TokenisedDocument
from pipeline.store.generated.group_files import encode_group, group_state, read_group, stored_groups
from pipeline.store.generated.group_keys import group_key
from pipeline.store.generated.kept_activations import KeptGroup, documents_digest, has_kept, put_kept
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
RESERVED_COLUMNS = frozenset([*_GROUP_SCHEMA.names, *COMPLETION_SCHEMA.names])
"""Which columns a source of prompts cannot have."""


@dataclass(frozen=True)
class Group:
    """A group of a stream's documents. A document's tokens are the prompt followed by the completion; its `info` has
    the columns of `COMPLETION_SCHEMA`. next: the cursor at which the next group's prompts begin."""

    index: int
    items: tuple[TokenisedDocument | SkippedDocument, ...]
    next: Cursor
    exhausted: bool  # the stream has no more documents

    @property
    def documents(self) -> list[TokenisedDocument]:
        return [item for item in self.items if isinstance(item, TokenisedDocument)]

    def kept(self, stream: int) -> KeptGroup:
        """Names the activations kept with the group, which is one of this stream."""
        return KeptGroup(stream, self.index, documents_digest(document.tokens for document in self.documents))


class GeneratedGroups:
    """The groups of one stream of a store. size: documents per group. info_schema: the columns of `Document.info`."""

    def __init__(self, storage: Storage, *, stream: int, num_streams: int, size: int, info_schema: pa.Schema) -> None:
        self.stream = stream
        self.size = size
        self.info_schema = info_schema
        self._storage = storage
        self._num_streams = num_streams
        self._schema = pa.unify_schemas([_GROUP_SCHEMA, info_schema])

    def count(self, kept: Sequence[str] = (), first: int = 0) -> int:
        """The number of groups, up to the first one (not before `first`) without the kept activations of the arrays
        `kept`. Raises StoreInvalid if a group among them is missing."""
        count = len(stored_groups(self._storage, self.stream))
        if not kept:
            return count
        groups = map(self.read, range(first, count))
        lacking = (group.index for group in groups if not has_kept(self._storage, group.kept(self.stream), kept))
        return next(lacking, count)

    def read(self, index: int) -> Group:
        """Reads a group. Raises StoreInvalid if it is missing or damaged."""
        table = read_group(self._storage, self.stream, index)
        state = group_state(table, group_key(self.stream, index))
        items = tuple(map(self._item, table.to_pylist()))
        return Group(index, items, Cursor(**state["next"]), state["exhausted"])

    def write(self, group: Group, kept: Mapping[str, np.ndarray] | None = None) -> Group:
        """Writes a group durably, unless the store has it. Returns the group that the store has now.

        kept: activations [n, D] of its documents' tokens, by array name, which are written first. Raises StoreError if
        the store has a group with different completions, and lacks the activations kept with these.
        """
        if kept:
            put_kept(self._storage, group.kept(self.stream), kept)
        rows = [self._row(item) for item in group.items]
        state = {"next": group.next.to_json(), "exhausted": group.exhausted}
        columns = {name: [row.get(name) for row in rows] for name in self._schema.names}
        table = pa.table(columns, schema=self._schema)
        key = group_key(self.stream, group.index)
        if self._storage.put(key, encode_group(table, state, self.stream, group.index)):
            return group
        stored = self.read(group.index)
        if kept and not has_kept(self._storage, stored.kept(self.stream), kept):
            raise StoreError(
                f"the completions in {key} differ from those generated now, and their activations are not kept any "
                "more. Run the same command with the mesh and data.rows of the run that wrote it."
            )
        return stored

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
        cursor = Cursor(row["shard"], row["index"], 0, (row["document"] - self.stream) // self._num_streams)
        return TokenisedDocument(document, np.array(row["prompt"] + row["completion"], np.int32), cursor)


class GeneratedDocuments:
    """A stream's generated documents, as `StreamDocuments` for `TokenStream`."""

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
