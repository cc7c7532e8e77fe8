"""The documents of a store: their table, and the location of one document, given its number or id."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int16, Int32, Int64, Shaped

from pipeline.core.errors import ArgumentError, StoreError, StoreInvalid
from pipeline.core.messages import shown
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import DOCUMENTS, TOKENS
from pipeline.store.format.metadata import StoreRoot
from pipeline.store.format.tables import empty_table, read_tables
from pipeline.store.indexes.ids import StoredIds, open_ids
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.storage import Storage
from pipeline.store.read.frameworks import FeatureBatch
from pipeline.store.read.rows import slot_side_arrays


@dataclass(frozen=True)
class DocumentActivations:
    """The n tokens of a document that have activations, in order.

    document, id: the document's number and id. rows: the store's rows in which the tokens are.
    activations: [n, D] by array name.
    outputs: the arrays of `capture.outputs` and of SAEs, [n] or [n, k] by array name.
    features: by the SAE's name, as in `Batch`.
    text: all m stored tokens of the document. places: the indices of the n tokens in `text`.
    labels: of the n tokens, of a conversation.
    """

    document: int
    id: str
    activations: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    features: Mapping[str, FeatureBatch]
    tokens: Int32[np.ndarray, " n"]
    positions: Int32[np.ndarray, " n"]
    rows: Int64[np.ndarray, " n"]
    text: Int32[np.ndarray, " m"]
    places: Int64[np.ndarray, " n"]
    labels: Int16[np.ndarray, "n 5"] | None = None


def document_slots(
    number: int, rows: Int64[np.ndarray, " R"], sides: Mapping[str, Shaped[np.ndarray, "R ..."]]
) -> tuple[Int64[np.ndarray, " n"], dict[str, Shaped[np.ndarray, "..."]]]:
    """Finds a document in `rows`: the slots of its tokens in their rows, and fields of `DocumentActivations`. sides:
    the rows' side arrays tokens, positions, documents, and `selected` and labels if the store has them."""
    in_text = sides[DOCUMENTS.name] == number
    places = np.cumsum(in_text).reshape(in_text.shape) - 1
    slot_sides = slot_side_arrays({**sides, "places": places})
    row, slots = np.nonzero(slot_sides.pop(DOCUMENTS.name) == number)
    fields = {name: values[row, slots] for name, values in slot_sides.items()}
    return slots, fields | {"rows": rows[row], "text": sides[TOKENS.name][in_text]}


@dataclass(frozen=True)
class Labels:
    """A value for each document: labels[batch.documents] are those of a batch's tokens, as a numpy array."""

    column: str
    numbers: Int64[np.ndarray, " n"]
    values: Shaped[np.ndarray, " n"]

    def __getitem__(self, documents: Any) -> Shaped[np.ndarray, "..."]:
        """Raises ArgumentError for a document without a value."""
        wanted = np.asarray(documents)
        if wanted.size and wanted.dtype.kind not in "iu":
            raise ArgumentError(f"labels[...] takes numbers of documents, got {shown(documents)}.")
        places = np.minimum(np.searchsorted(self.numbers, wanted), len(self.numbers) - 1)
        is_known = self.numbers[places] == wanted if len(self.numbers) else np.zeros(wanted.shape, bool)
        if not np.all(is_known):
            unknown = np.unique(wanted[~is_known])[:8].tolist()
            raise ArgumentError(f"documents {unknown} have no {self.column}, expected numbers of stored documents.")
        return self.values[places]


def blocks_with_documents(blocks: BlockTable, num_streams: int, numbers: Int64[np.ndarray, " n"]) -> BlockTable:
    """The blocks that contain tokens of documents, and at most one more for each. A document's number is its ordinal in
    its stream times the number of streams, plus the stream."""
    keep = np.zeros(len(blocks), bool)
    for stream in np.unique(numbers % num_streams).tolist():
        in_stream = np.flatnonzero(blocks.values["stream"] == stream)
        part, ordinals = blocks[in_stream], numbers[numbers % num_streams == stream] // num_streams
        firsts, continues = part.column("first_document"), np.append(part.continues, False)
        start, stop = (np.searchsorted(firsts, ordinals, side=side) for side in ("left", "right"))
        # Otherwise the previous block has the beginning of the document, or all of it.
        start = np.maximum(0, start - ((start == stop) | continues[start]))
        edges = np.bincount(start, minlength=len(part) + 1) - np.bincount(stop, minlength=len(part) + 1)
        keep[in_stream] = np.cumsum(edges)[:-1] > 0
    return blocks[np.flatnonzero(keep)]


class StoredDocuments:
    """The documents of the committed `blocks`. Methods raise StoreError."""

    def __init__(self, storage: Storage, root: StoreRoot, blocks: BlockTable) -> None:
        self._storage = storage
        self._root = root
        self._blocks = blocks
        self._num_streams = root.metadata.num_streams

    @cached_property
    def table(self) -> pa.Table:
        """The document tables of all blocks."""
        return self.read(self._blocks)

    def read(self, blocks: BlockTable | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """The document tables of the given blocks, or of all, with some columns or all. Raises ArgumentError for a
        column that none of them has."""
        if blocks is None and columns is None:
            return self.table
        tables = read_tables(self._storage, self._blocks if blocks is None else blocks)
        if columns is not None:  # while they are read, so that the other columns take no memory
            tables = (table.select([name for name in columns if name in table.column_names]) for table in tables)
        table = _joined(list(tables) or [empty_table()])
        if missing := [name for name in columns or () if name not in table.column_names]:
            known = self.read(self._blocks[:1]).column_names
            raise ArgumentError(f"the documents of {self._storage.path} have no columns {missing}, expected {known}.")
        return table if columns is None else table.select(columns)

    @cached_property
    def _ids(self) -> StoredIds | None:
        return open_ids(self._storage, self._root)

    @cached_property
    def _not_indexed(self) -> pa.Table:
        """The document tables of the blocks that the index of ids does not cover."""
        if self._ids is None:
            return self.table
        return self.read(self._blocks[np.flatnonzero(~self._ids.covers(self._blocks))])

    def blocks_with(self, number: int) -> BlockTable:
        """The blocks that contain tokens of a document, and at most one more."""
        return blocks_with_documents(self._blocks, self._num_streams, np.array([number]))

    def labels(self, column: str, table: pa.Table | None = None) -> "Labels":
        """The values of a column of the document tables, or of a user's table with a column `id`, by document."""
        if table is None:
            documents = self.read(columns=list(dict.fromkeys(["document", column])))
            values = documents[column]
        else:
            if missing := {"id", column} - set(table.column_names):
                raise ArgumentError(f"the table has no columns {sorted(missing)}; it has {table.column_names}.")
            documents = self.read(columns=["document", "id"])
            try:  # of dictionaries, and of the large strings of other libraries
                ids = table["id"].cast(pa.string())
            except pa.ArrowException as error:
                raise ArgumentError(f"the table's column id is of {table['id'].type}, expected strings.") from error
            places = pc.index_in(documents["id"], ids.combine_chunks())
            documents, values = documents.filter(places.is_valid()), table[column].take(places.drop_null())
        numbers, first = np.unique(documents["document"].to_numpy(), return_index=True)
        return Labels(column, numbers, values.to_numpy()[first])

    def find(self, document: str | int) -> tuple[int, str]:
        """The number and the id of the document with this id or number. For an id, reads the document tables of those
        blocks that may contain it according to the index of ids, and of all blocks without an index. Raises StoreError
        unless exactly one document has it."""
        if isinstance(document, str):
            column, hits = "id", BlockTable() if self._ids is None else self._ids.find(document, self._blocks)
            table = _joined([self._not_indexed, self.read(hits)])
        else:
            column, table = "document", self.read(self.blocks_with(document))
        entries = table.filter(pc.equal(table[column], document))
        numbers = pc.unique(entries["document"]).to_pylist()
        if len(numbers) != 1:
            hint = f"documents {sorted(numbers)} have it; pass a number" if numbers else "no document has it"
            raise StoreError(f"{column} {document!r} in the store {self._storage.path}: {hint}. See store.documents().")
        return numbers[0], entries["id"][0].as_py()


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    """All rows of the tables, whose columns may differ."""
    try:
        return pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as error:
        raise StoreInvalid(f"the document tables have columns of different types: {error}. {DAMAGE_REMEDY}") from error
