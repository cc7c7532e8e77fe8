"""The documents of a store: their table, and where one of them is, by number or by id."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int32, Int64, Shaped

from pipeline.core.errors import StoreError
from pipeline.store.format.block_table import Block, BlockTable, split_streams
from pipeline.store.format.layout import DOCUMENTS, POSITIONS, SELECTED, TOKENS
from pipeline.store.format.tables import empty_table, read_tables
from pipeline.store.ids.lookup import StoredIds
from pipeline.store.io.storage import Storage
from pipeline.store.read.features import FeatureBatch
from pipeline.store.read.rows import at_selected, slot_side_arrays

log = logging.getLogger("pipeline")

_MANY_TABLES = 1000
_MANY_READ = (
    "%s: the document tables of %d blocks are read to find an id. An index of ids saves that: "
    "python -m pipeline.index store.path=%s"
)


@dataclass(frozen=True)
class DocumentActivations:
    """The n tokens of a document that have activations, in order, and these [n, D] by array name.

    outputs: what the model's head says of them, [n] or [n, k] by array name (`capture.outputs`), and the arrays of
    features. features: these by the SAE's name, as in `Batch`.
    text: all m stored tokens of the document. places: where the n stand among them.
    """

    document: int
    id: str
    tokens: Int32[np.ndarray, " n"]
    positions: Int32[np.ndarray, " n"]
    rows: Int64[np.ndarray, " n"]
    activations: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    features: Mapping[str, FeatureBatch]
    text: Int32[np.ndarray, " m"]
    places: Int64[np.ndarray, " n"]


@dataclass(frozen=True)
class DocumentSlots:
    """Where a document is: its rows, and which of their slots are its own. See `DocumentActivations`."""

    rows: Int64[np.ndarray, " r"]
    in_document: Bool[np.ndarray, "r S"]
    tokens: Int32[np.ndarray, " n"]
    positions: Int32[np.ndarray, " n"]
    text: Int32[np.ndarray, " m"]
    places: Int64[np.ndarray, " n"]


def document_slots(
    number: int, rows: Int64[np.ndarray, " R"], sides: Mapping[str, Shaped[np.ndarray, "R ..."]]
) -> DocumentSlots:
    """A document in some rows. sides: tokens, positions, documents and, where tokens are selected, `selected`."""
    holds = (sides[DOCUMENTS.name] == number).any(axis=1)
    sides = {name: values[holds] for name, values in sides.items()}
    in_text = sides[DOCUMENTS.name] == number
    places = np.cumsum(in_text).reshape(in_text.shape) - 1
    slots = slot_side_arrays(sides)
    in_document = slots[DOCUMENTS.name] == number
    if SELECTED.name in sides:
        places = at_selected(places, sides[SELECTED.name], -1)
    return DocumentSlots(
        rows=rows[holds],
        in_document=in_document,
        tokens=slots[TOKENS.name][in_document],
        positions=slots[POSITIONS.name][in_document],
        text=sides[TOKENS.name][in_text],
        places=places[in_document],
    )


class StoredDocuments:
    """The documents of the committed `blocks`. Methods raise StoreError."""

    def __init__(self, storage: Storage, blocks: BlockTable, num_streams: int) -> None:
        self._storage = storage
        self._blocks = blocks
        self._num_streams = num_streams
        self._not_indexed = BlockTable(), empty_table()  # blocks, and their document tables

    @cached_property
    def table(self) -> pa.Table:
        """The document tables of all blocks."""
        return self._read(self._blocks)

    def _read(self, blocks: Sequence[Block]) -> pa.Table:
        tables = list(read_tables(self._storage, blocks))
        return pa.concat_tables(tables, promote_options="default") if tables else empty_table()

    def _read_not_indexed(self, blocks: BlockTable) -> pa.Table:
        """The document tables of blocks that no index knows, which are kept for the next lookup."""
        known, table = self._not_indexed
        if not np.array_equal(known.values, blocks.values):
            if len(blocks) > _MANY_TABLES and self._storage.is_remote:
                log.warning(_MANY_READ, self._storage.path, len(blocks), self._storage.path)
            table = self.table if len(blocks) == len(self._blocks) else self._read(blocks)
            self._not_indexed = blocks, table
        return table

    @cached_property
    def _ids(self) -> StoredIds:
        return StoredIds(self._storage, self._stream_blocks)

    @cached_property
    def _stream_blocks(self) -> list[BlockTable]:
        return split_streams(self._blocks, self._num_streams)

    def blocks_of(self, number: int) -> BlockTable:
        """The blocks that a document has tokens in, and at most one more. Its number is its ordinal in its stream times
        the number of streams, plus the stream."""
        ordinal, stream = divmod(number, self._num_streams)
        blocks = self._stream_blocks[stream]
        firsts = blocks.column("first_document")
        start, stop = np.searchsorted(firsts, ordinal, side="left"), np.searchsorted(firsts, ordinal, side="right")
        if start == stop or blocks.continues[start]:
            start -= 1  # the block before has the beginning of the document, or all of it
        return blocks[max(0, start) : stop]

    def with_number(self, number: int, blocks: Sequence[Block]) -> pa.Table:
        """The rows of the blocks' document tables that a document has. Raises StoreError where it has none."""
        return self._of_one(self._read(blocks), "document", number)

    def with_id(self, id: str) -> pa.Table:
        """The rows that a document has in the document tables of all blocks, which are read where no index of ids says
        which have it. Raises StoreError unless exactly one document has the id."""
        if "table" in vars(self):
            return self._of_one(self.table, "id", id)
        hits, not_indexed = self._ids.find(id)
        tables = [self._read_not_indexed(not_indexed), *([self._read(hits)] if len(hits) else [])]
        return self._of_one(pa.concat_tables(tables, promote_options="default"), "id", id)

    def _of_one(self, table: pa.Table, column: str, value: str | int) -> pa.Table:
        entries = table.filter(pc.equal(table[column], value))
        numbers = pc.unique(entries["document"]).to_pylist()
        if len(numbers) != 1:
            hint = f"documents {sorted(numbers)} have it; ask for one by number" if numbers else "no document has it"
            raise StoreError(f"{column} {value!r} in the store {self._storage.path}: {hint}.")
        return entries
