"""The documents of a store: their table, and the location of one document, given its number or id."""

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
    "%s: finding an id requires reading the document tables of %d blocks. To avoid that, write an index of ids: "
    "python -m pipeline.index store.path=%s"
)


@dataclass(frozen=True)
class DocumentActivations:
    """The n tokens of a document that have activations, in order.

    document, id: the document's number and id. rows: the store's rows in which the tokens are.
    activations: [n, D] by array name.
    outputs: the arrays of `capture.outputs` and of SAEs, [n] or [n, k] by array name.
    features: by the SAE's name, as in `Batch`.
    text: all m stored tokens of the document. places: the indices of the n tokens in `text`.
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
    """The rows of a document, and which of their slots hold its tokens. See `DocumentActivations`."""

    rows: Int64[np.ndarray, " r"]
    in_document: Bool[np.ndarray, "r S"]
    tokens: Int32[np.ndarray, " n"]
    positions: Int32[np.ndarray, " n"]
    text: Int32[np.ndarray, " m"]
    places: Int64[np.ndarray, " n"]


def document_slots(
    number: int, rows: Int64[np.ndarray, " R"], sides: Mapping[str, Shaped[np.ndarray, "R ..."]]
) -> DocumentSlots:
    """Finds a document in `rows`. sides: their side arrays tokens, positions, documents, and `selected` if the store
    has it."""
    has_document = (sides[DOCUMENTS.name] == number).any(axis=1)
    sides = {name: values[has_document] for name, values in sides.items()}
    in_text = sides[DOCUMENTS.name] == number
    places = np.cumsum(in_text).reshape(in_text.shape) - 1
    slots = slot_side_arrays(sides)
    in_document = slots[DOCUMENTS.name] == number
    if SELECTED.name in sides:
        places = at_selected(places, sides[SELECTED.name], -1)
    return DocumentSlots(
        rows=rows[has_document],
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
        self._not_indexed = BlockTable(), empty_table()  # blocks without an index of ids, and their document tables

    @cached_property
    def table(self) -> pa.Table:
        """The document tables of all blocks."""
        return self._read(self._blocks)

    def _read(self, blocks: Sequence[Block]) -> pa.Table:
        tables = list(read_tables(self._storage, blocks))
        return pa.concat_tables(tables, promote_options="default") if tables else empty_table()

    def _read_not_indexed(self, blocks: BlockTable) -> pa.Table:
        """The document tables of blocks without an index of ids, kept for the next lookup."""
        blocks_read, table = self._not_indexed
        if not np.array_equal(blocks_read.values, blocks.values):
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

    def blocks_with(self, number: int) -> BlockTable:
        """The blocks that contain tokens of a document, and at most one more. A document's number is its ordinal in its
        stream times the number of streams, plus the stream."""
        ordinal, stream = divmod(number, self._num_streams)
        blocks = self._stream_blocks[stream]
        firsts = blocks.column("first_document")
        start, stop = np.searchsorted(firsts, ordinal, side="left"), np.searchsorted(firsts, ordinal, side="right")
        if start == stop or blocks.continues[start]:
            start -= 1  # the previous block has the beginning of the document, or all of it
        return blocks[max(0, start) : stop]

    def with_number(self, number: int, blocks: Sequence[Block]) -> pa.Table:
        """A document's rows in the blocks' document tables. Raises StoreError if it has none."""
        return self._one_document(self._read(blocks), "document", number)

    def with_id(self, id: str) -> pa.Table:
        """A document's rows in the document tables of all blocks. Reads those of the blocks that may contain the id
        according to the index of ids, and of all blocks without one. Raises StoreError unless exactly one document has
        the id."""
        if "table" in vars(self):
            return self._one_document(self.table, "id", id)
        hits, not_indexed = self._ids.find(id)
        tables = [self._read_not_indexed(not_indexed), *([self._read(hits)] if len(hits) else [])]
        return self._one_document(pa.concat_tables(tables, promote_options="default"), "id", id)

    def _one_document(self, table: pa.Table, column: str, value: str | int) -> pa.Table:
        entries = table.filter(pc.equal(table[column], value))
        numbers = pc.unique(entries["document"]).to_pylist()
        if len(numbers) != 1:
            hint = f"documents {sorted(numbers)} have it; pass a number" if numbers else "no document has it"
            raise StoreError(f"{column} {value!r} in the store {self._storage.path}: {hint}.")
        return entries
