"""A stream: a fixed share of the source shards, as consecutive blocks of token rows.

Stream s of S reads the source shards s, s + S, s + 2 S, ... The rows of a block only depend on its stream and index,
the source, the tokenizer and the batch settings, and not on interruptions, reading ahead or the number of tokens that
a run asks for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from jaxtyping import Int32, Int64

from pipeline.config.choices import LongDocuments, Packing
from pipeline.core.errors import ConfigError
from pipeline.data.demand import Demand
from pipeline.data.documents import (
    DOCUMENT_SCHEMA,
    SELECTED_FIELDS,
    STREAM_START,
    Cursor,
    Document,
    SkippedDocument,
    TokenBlock,
)
from pipeline.data.packing import Placement, fill, pack, pad, windows
from pipeline.data.selection import Chosen, Selection, costs, selected_slots
from pipeline.data.tokenised import StreamDocuments, TokenisedDocument


@dataclass(frozen=True, slots=True)
class _Parent:
    """A document, kept until its block is made, without its text and without tokens that are cut. num_tokens: with
    these."""

    document: Document
    tokens: Int32[np.ndarray, "_"]
    num_tokens: int
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens `first` to `last` of a document: the unit of packing. chosen: the selected ones among them."""

    parent: _Parent
    first: int
    last: int
    chosen: Chosen | None = None

    @property
    def size(self) -> int:
        return self.last - self.first

    @property
    def tokens(self) -> Int32[np.ndarray, "_"]:
        return self.parent.tokens[self.first : self.last]

    @property
    def cursor(self) -> Cursor:
        return replace(self.parent.cursor, token=self.first)


@dataclass
class _Pending:
    """Pieces and skips that were read but are in no block yet. Each skip has the number of the stream's pieces before
    it."""

    pieces: list[_Piece] = field(default_factory=list)
    skips: list[tuple[int, SkippedDocument]] = field(default_factory=list)
    num_tokens: int = 0
    num_taken: int = 0

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.num_tokens += piece.size

    def add_skip(self, skip: SkippedDocument) -> None:
        self.skips.append((self.num_taken + len(self.pieces), skip))

    def take(self, count: int) -> tuple[list[_Piece], list[SkippedDocument]]:
        """Removes and returns the first `count` pieces, and the skips before the next piece."""
        pieces, self.pieces = self.pieces[:count], self.pieces[count:]
        self.num_tokens -= sum(piece.size for piece in pieces)
        self.num_taken += count
        skips = [skip for before, skip in self.skips if before <= self.num_taken]
        self.skips = self.skips[len(skips) :]
        return pieces, skips


class TokenStream:
    """The blocks of stream `stream` of `num_streams`. The constructor does not read anything."""

    def __init__(
        self,
        documents: StreamDocuments,
        *,
        stream: int,
        num_streams: int,
        rows_per_block: int,
        length: int,
        packing: Packing = Packing.pack,
        long_documents: LongDocuments = LongDocuments.split,
        selection: Selection | None = None,
    ) -> None:
        """selection: None selects all tokens. Raises ConfigError if documents have a column that a selection adds."""
        added = {field.name for field in SELECTED_FIELDS} if selection is not None else set()
        if reserved := sorted(added & {*documents.info_schema.names}):
            raise ConfigError(f"the data has a column {reserved[0]}, which capture.positions adds. Remove it.")
        self.stream = stream
        self._num_streams = num_streams
        self._num_rows = rows_per_block
        self._length = length
        self._packing = packing
        self._long_documents = long_documents
        self._documents = documents
        self._selection = selection

    def blocks(
        self,
        start: Cursor = STREAM_START,
        index: int = 0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[TokenBlock]:
        """The blocks from block `index` on.

        start: the `next` of the previous block. Every stream ends with a block that is `exhausted`; if it has no
        documents or only skipped ones, this is a block without rows.
        should_stop: called before every document. Once it returns true, as it must then continue to do, no more blocks
        are yielded.

        Raises InputError for bad documents, depending on `on_error`, and ConfigError for a cursor that was made with
        different batch settings.
        """
        self._require_valid(start)
        documents = self._documents.read(start, should_stop)
        pending = _Pending()
        while True:
            self._read_ahead(documents, pending, start)
            if should_stop():
                return
            placement = self._place(pending.pieces)
            pieces, skips = pending.take(placement.num_pieces)
            if not pieces and index:
                return
            block = self._block(index, start, placement, pieces, skips, pending.pieces)
            yield block
            if block.exhausted:
                return
            start, index = block.next, index + 1

    def demand(self, start: Cursor, wanted: int | None) -> Demand:
        """The documents from `start` on that are read for blocks with `wanted` tokens; None for all."""
        return Demand(wanted, self._num_rows, self._length, self._packing, self._long_documents, start.token)

    def _require_valid(self, start: Cursor) -> None:
        if start.token % self._length or (start.token and self._long_documents is LongDocuments.cut):
            raise ConfigError(
                f"stream {self.stream} cannot start at token {start.token} of a document with rows of {self._length} "
                "tokens. Resume with the batch settings of the run that created the store."
            )

    def _read_ahead(
        self, documents: Iterator[TokenisedDocument | SkippedDocument], pending: _Pending, start: Cursor
    ) -> None:
        """Reads more than a block of pieces, so that the next block's first piece is known."""

        def has_enough() -> bool:
            if self._packing is Packing.pad:
                return len(pending.pieces) > self._num_rows
            return pending.num_tokens > self._num_rows * self._length

        while not has_enough() and (item := next(documents, None)) is not None:
            if isinstance(item, SkippedDocument):
                pending.add_skip(item)
                continue
            begin = start.token if item.cursor.ordinal == start.ordinal else 0
            parent = self._parent(item)
            for first, last in windows(parent.num_tokens, self._length, self._long_documents, begin):
                pending.add(self._with_selection(_Piece(parent, first, last)))

    def _parent(self, item: TokenisedDocument) -> _Parent:
        tokens = item.tokens
        if self._long_documents is LongDocuments.cut:
            tokens = tokens[: self._length].copy()
        return _Parent(replace(item.document, text=""), tokens, len(item.tokens), item.cursor)

    def _with_selection(self, piece: _Piece) -> _Piece:
        if self._selection is None:
            return piece
        is_end = piece.last == len(piece.parent.tokens)
        chosen = self._selection.choose(piece.tokens, self._number(piece), piece.first, is_end)
        return replace(piece, chosen=chosen)

    def _place(self, pieces: Sequence[_Piece]) -> Placement:
        sizes = np.array([piece.size for piece in pieces], np.int64)
        if self._packing is Packing.pad:
            return pad(sizes, self._num_rows)
        if self._selection is None:
            return pack(sizes, self._num_rows, self._length)
        piece_costs, row_budget = costs(self._selection, sizes, [piece.chosen for piece in pieces], self._length)
        return pack(sizes, self._num_rows, self._length, piece_costs, row_budget)

    def _block(
        self,
        index: int,
        start: Cursor,
        placement: Placement,
        pieces: Sequence[_Piece],
        skips: Sequence[SkippedDocument],
        left: Sequence[_Piece],
    ) -> TokenBlock:
        """The block with these pieces. `left`: the pieces read after them; none if the stream is exhausted."""
        numbers = np.array([self._number(piece) for piece in pieces], np.int64)
        rows = fill(placement, [piece.tokens for piece in pieces], numbers, self._length)
        selected, num_selected = None, None
        if self._selection is not None:
            chosen = [piece.chosen for piece in pieces]
            selected, num_selected = selected_slots(placement, chosen, self._selection.slots)
        num_documents = pieces[-1].parent.cursor.ordinal + 1 if pieces else start.ordinal
        return TokenBlock(
            stream=self.stream,
            index=index,
            tokens=rows.tokens,
            segments=rows.segments,
            positions=rows.positions,
            documents=rows.documents,
            selected=selected,
            table=self._table(pieces, num_selected),
            skipped=tuple(skips),
            start=start,
            next=left[0].cursor if left else Cursor(shard=self._documents.num_shards, ordinal=num_documents),
            exhausted=not left,
        )

    def _number(self, piece: _Piece) -> int:
        """The document's number in the store."""
        return piece.parent.cursor.ordinal * self._num_streams + self.stream

    def _table(self, pieces: Sequence[_Piece], num_selected: Int64[np.ndarray, " P"] | None) -> pa.Table:
        """The document table: one row per document. A document's pieces in a block are contiguous."""
        first = {self._number(piece): piece for piece in reversed(pieces)}
        last = {self._number(piece): piece for piece in pieces}
        parents = [piece.parent for piece in last.values()]
        columns: dict[str, list] = {
            "document": list(last),
            "id": [parent.document.id for parent in parents],
            "source": [parent.document.source for parent in parents],
            "index": [parent.document.index for parent in parents],
            "n_tokens": [parent.num_tokens for parent in parents],
            "n_cut": [parent.num_tokens - len(parent.tokens) for parent in parents],
            "first_token": [first[number].first for number in last],
            "last_token": [piece.last for piece in last.values()],
        }
        schema = DOCUMENT_SCHEMA
        if num_selected is not None:
            stored, chosen = dict.fromkeys(last, 0), dict.fromkeys(last, 0)
            for piece, count in zip(pieces, num_selected.tolist(), strict=True):
                stored[self._number(piece)] += count
                chosen[self._number(piece)] += len(piece.chosen.places)
            columns["n_selected"] = list(stored.values())
            columns["n_unselected"] = [chosen[number] - count for number, count in stored.items()]
            schema = pa.schema([*schema, *SELECTED_FIELDS])
        for name in self._documents.info_schema.names:
            columns[name] = [parent.document.info.get(name) for parent in parents]
        return pa.table(columns, schema=pa.unify_schemas([schema, self._documents.info_schema]))
