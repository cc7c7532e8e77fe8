"""What the model wrote: a stream's prompts with their completions, in groups, each one parquet file.

Groups 0, 1, 2, ... hold a stream's documents in order, `size` of them each; the last one has fewer, or none, and says
that the stream has ended. A group is written whole, after those before it, and never again.
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
from pipeline.store.generated.kept_activations import first_without_kept, write_kept
from pipeline.store.io.storage import Storage

# The columns of a generated document, besides those of its source.
COMPLETION_SCHEMA = pa.schema(
    [
        ("n_prompt", pa.int64()),
        ("n_prompt_cut", pa.int64()),  # tokens that the prompt lost at its beginning
        ("n_completion", pa.int64()),
        ("finish_reason", pa.string()),  # stop: with an end token, which is the last; length: there was no more room
        ("sampling_seed", pa.int64()),
    ]
)
_GROUP_SCHEMA = pa.schema(
    [
        ("document", pa.int64()),  # the number; null for one that was left out
        ("id", pa.string()),
        ("source", pa.string()),
        ("index", pa.int64()),
        ("shard", pa.int64()),  # how many of the stream's source shards come before the document's
        ("prompt", pa.list_(pa.int32())),
        ("completion", pa.list_(pa.int32())),
        ("skipped", pa.string()),  # why it was left out
    ]
)
RESERVED_COLUMNS = frozenset([*_GROUP_SCHEMA.names, *COMPLETION_SCHEMA.names])
"""Which columns a source of prompts cannot have."""


@dataclass(frozen=True)
class Group:
    """Some documents of a stream. Their tokens are the prompt's, then the completion's; `info` has the columns of
    `COMPLETION_SCHEMA`. `next` is where the prompts of the group after it begin."""

    index: int
    items: tuple[TokenisedDocument | SkippedDocument, ...]
    next: Cursor
    exhausted: bool  # the stream has no document after these

    @property
    def documents(self) -> list[TokenisedDocument]:
        return [item for item in self.items if isinstance(item, TokenisedDocument)]


class GeneratedGroups:
    """The groups of one stream of a store. `info_schema`: the columns of `Document.info`."""

    def __init__(self, storage: Storage, *, stream: int, num_streams: int, size: int, info_schema: pa.Schema) -> None:
        self.stream = stream
        self.size = size
        self.info_schema = info_schema
        self._storage = storage
        self._num_streams = num_streams
        self._schema = pa.unify_schemas([_GROUP_SCHEMA, info_schema])

    def count(self, kept: Sequence[str] = (), first: int = 0) -> int:
        """The number of groups, up to the first one from number `first` on that lacks the activations `kept`.

        Raises StoreInvalid when one is missing among them."""
        count = len(stored_groups(self._storage, self.stream))
        return first_without_kept(self._storage, self.stream, range(first, count), kept) if kept else count

    def read(self, index: int) -> Group:
        """Raises StoreInvalid for a group that is missing or damaged."""
        table = read_group(self._storage, self.stream, index)
        state = group_state(table, group_key(self.stream, index))
        items = tuple(map(self._item, table.to_pylist()))
        return Group(index, items, Cursor(**state["next"]), state["exhausted"])

    def write(self, group: Group, kept: Mapping[str, np.ndarray] | None = None) -> None:
        """Writes a group durably, unless there is one: it was then written by another run, and stays. `kept`: the
        activations [n, D] of its documents' tokens, by array name, which are written first.

        Raises StoreError, and writes nothing, where `kept` is given and the store has this group with other documents.
        """
        rows = [self._row(item) for item in group.items]
        state = {"next": group.next.to_json(), "exhausted": group.exhausted}
        columns = {name: [row.get(name) for row in rows] for name in self._schema.names}
        table = pa.table(columns, schema=self._schema)
        key = group_key(self.stream, group.index)
        if kept:
            self._require_same(key, group.index, table)
            write_kept(self._storage, self.stream, group.index, kept)
        self._storage.write_if_absent(key, encode_group(table, state, self.stream, group.index))

    def _require_same(self, key: str, index: int, table: pa.Table) -> None:
        """Raises StoreError where the store has this group with other documents than those of `table`."""
        columns = ["document", "prompt", "completion"]
        if self._storage.read(key) is None:
            return
        stored = read_group(self._storage, self.stream, index)
        if stored.select(columns).to_pylist() != table.select(columns).to_pylist():
            raise StoreError(
                f"{key} holds other completions than the model has written now, since rows or devices are others. Run "
                "the same command again with the mesh and the data.rows of the run that wrote it."
            )

    def _row(self, item: TokenisedDocument | SkippedDocument) -> dict[str, object]:
        if isinstance(item, SkippedDocument):
            return {"source": item.source, "index": item.index, "skipped": item.reason}
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
            return SkippedDocument(row["source"], row["index"], row["skipped"])
        info = {name: row[name] for name in self.info_schema.names}
        document = Document(row["id"], "", row["source"], row["index"], info)
        cursor = Cursor(row["shard"], row["index"], 0, (row["document"] - self.stream) // self._num_streams)
        return TokenisedDocument(document, np.array(row["prompt"] + row["completion"], np.int32), cursor)


class GeneratedDocuments:
    """A stream's generated documents, as `TokenStream` reads them: a `StreamDocuments`."""

    def __init__(self, groups: GeneratedGroups, num_shards: int) -> None:
        self.num_shards = num_shards
        self.info_schema = groups.info_schema
        self._groups = groups

    def read(
        self, start: Cursor, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[TokenisedDocument | SkippedDocument]:
        """See `StreamDocuments`. Raises StoreInvalid for a group that is missing or damaged."""
        index = start.ordinal // self._groups.size
        started = start == STREAM_START  # what was left out before the cursor's document is in an earlier block
        while not should_stop():
            group = self._groups.read(index)
            for item in group.items:
                started = started or (isinstance(item, TokenisedDocument) and item.cursor.ordinal == start.ordinal)
                if started:
                    yield item
            if group.exhausted:
                return
            index += 1
