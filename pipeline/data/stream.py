"""A stream: a fixed share of the source shards, as consecutive blocks of token rows.

Stream s of S reads the source shards s, s + S, s + 2 S, ... The rows of a block only depend on its stream and index,
the source, the tokenizer and the batch settings, and not on interruptions, reading ahead or the number of tokens that
a run asks for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
from jaxtyping import Int16, Int32, Int64

from pipeline.config.choices import LongDocuments, Packing
from pipeline.core.errors import ConfigError
from pipeline.data.documents import DOCUMENT_SCHEMA, SELECTED_FIELDS, STREAM_START, Cursor, SkippedDocument, TokenBlock
from pipeline.data.packing import Placement, fill, join, pack, pack_in_order, pad, windows
from pipeline.data.selection import Chosen, Selection, costs, selected_slots
from pipeline.data.text.contexts import joined, restarted
from pipeline.data.text.labels import Label
from pipeline.data.tokenised import StreamDocuments, TokenisedDocument, labels_at


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens `first` to `last` of a document: the unit of packing. chosen: the selected ones among them. column: the
    piece's place in its row if that is fixed, with packing=concat. context: how many tokens before `first` are in the
    row, too.

    The document has no text, the tokens that windows repeat or rows add, and not those that are cut; its `num_cut`
    counts these.
    """

    document: TokenisedDocument
    first: int
    last: int
    chosen: Chosen | None = None
    column: int = 0
    context: int = 0

    @property
    def size(self) -> int:
        """How many tokens of a row it takes."""
        return self.context + self.last - self.first

    @property
    def tokens(self) -> Int32[np.ndarray, "_"]:
        return self.document.tokens[self.first - self.context : self.last]

    @property
    def labels(self) -> Int16[np.ndarray, "_ 5"] | None:
        labels = self.document.labels
        return None if labels is None else labels[self.first - self.context : self.last]

    @property
    def cursor(self) -> Cursor:
        return replace(self.document.cursor, token=self.first)


@dataclass(frozen=True)
class TokenStream:
    """The blocks of stream `stream` of `num_streams`. Making one does not read anything.

    selection: None selects all tokens. Raises ConfigError if documents have a column that a selection adds.
    """

    documents: StreamDocuments
    _: KW_ONLY
    stream: int
    num_streams: int
    rows_per_block: int
    length: int
    packing: Packing = Packing.pack
    long_documents: LongDocuments = LongDocuments.split
    selection: Selection | None = None

    def __post_init__(self) -> None:
        added = [] if self.selection is None else [field.name for field in SELECTED_FIELDS]
        if reserved := [name for name in added if name in self.documents.info_schema.names]:
            raise ConfigError(f"the data has a column {reserved[0]}, which capture.positions adds. Remove it.")

    @property
    def overlap(self) -> int:
        """`batch.overlap`."""
        return 0 if self.selection is None else self.selection.overlap

    def blocks(
        self, start: Cursor = STREAM_START, index: int = 0, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[TokenBlock]:
        """The blocks from block `index` on.

        start: the `next` of the previous block. Every stream ends with a block that is `exhausted`; if it has no
        documents or only skipped ones, this is a block without rows.
        should_stop: called before every document. Once it returns true, as it must then continue to do, no more blocks
        are yielded.

        Raises InputError for bad documents, depending on `on_error`, and ConfigError for a cursor that was made with
        different batch settings.
        """
        items = self._items(start, should_stop)
        pending: list[_Piece | SkippedDocument] = []  # what was read, but is in no block yet
        while True:
            self._read_ahead(items, pending)
            if should_stop():
                return
            places = [place for place, item in enumerate(pending) if isinstance(item, _Piece)]
            placement = self._placed([pending[place] for place in places])
            # Skips before the first piece that is left belong to this block.
            end = places[placement.num_pieces] if placement.num_pieces < len(places) else len(pending)
            taken, pending = pending[:end], pending[end:]
            if not placement.num_pieces and index:
                return
            block = self._block(index, start, placement, taken, pending[0] if pending else None)
            yield block
            if block.exhausted:
                return
            start, index = block.next, index + 1

    def _read_ahead(self, items: Iterator[_Piece | SkippedDocument], pending: list[_Piece | SkippedDocument]) -> None:
        """Reads more than a block of pieces, so that the next block's first piece is known."""
        is_pad = self.packing is Packing.pad
        missing = self.rows_per_block if is_pad else self.rows_per_block * self.length

        def taken(item: _Piece | SkippedDocument) -> int:
            return 0 if isinstance(item, SkippedDocument) else 1 if is_pad else item.size

        missing -= sum(map(taken, pending))
        while missing >= 0 and (item := next(items, None)) is not None:
            pending.append(item)
            missing -= taken(item)

    def _items(self, start: Cursor, should_stop: Callable[[], bool]) -> Iterator[_Piece | SkippedDocument]:
        """The pieces of the documents from `start` on, and the skips between them."""
        column = -start.token  # a block begins with a row
        for item in self.documents.read(start, should_stop):
            if isinstance(item, SkippedDocument):
                yield item
                continue
            begin = start.token if item.cursor.ordinal == start.ordinal else 0
            for piece in self._pieces(item, begin, self._place(column)):
                column = piece.column + piece.size
                yield piece

    def _pieces(self, item: TokenisedDocument, begin: int, column: int) -> Iterator[_Piece]:
        """The pieces of a document from token `begin` on. column: where its first token is in a row, with concat."""
        document, ends = self._laid_out(item, column)
        is_labelled = None if self.selection is None else self.selection.labelled(document.labels)
        for first, last, context in self._windows(ends, begin, column):
            place = self._place(column + first)
            piece = _Piece(document, first, last, column=place, context=context)
            if self.selection is not None:
                among = None if is_labelled is None else is_labelled[first:last]
                tokens, number = document.tokens[first:last], self._number(piece)
                places, ranks = self.selection.choose(tokens, number, first, last in ends, among, place + context)
                piece = replace(piece, chosen=Chosen(places + context, ranks))
            yield piece

    def _place(self, column: int) -> int:
        """The place in its row of a token that follows `column` others of joined rows; 0 unless rows are joined."""
        return column % self.length if self.packing is Packing.concat else 0

    def _laid_out(self, item: TokenisedDocument, column: int) -> tuple[TokenisedDocument, list[int]]:
        """The document with the tokens that stand in rows, and where each of its texts ends in these."""
        is_cut, length = self.long_documents is LongDocuments.cut, self.length
        tokens, labels, ends, num_cut = [], None, [0], 0
        for text in np.split(item.tokens, item.document.breaks):
            num_cut += max(0, len(text) - length) if is_cut else 0
            if self.packing is Packing.concat:
                text = text[: length if is_cut else None]
                places = joined(text, length, self._place(column + ends[-1]), self.documents.added)
            else:
                places = restarted(text, length, self.documents.added)[: length if is_cut else None]
            tokens.append(self.documents.added.take(text, places))
            ends.append(ends[-1] + len(places))
        if item.labels is not None:  # a conversation is one text
            labels = labels_at(item.labels[: len(text)], places)
        document = replace(item.document, text="", labels=None, tokens=None)
        return replace(item, document=document, tokens=np.concatenate(tokens), num_cut=num_cut, labels=labels), ends

    def _windows(self, ends: Sequence[int], begin: int, column: int) -> list[tuple[int, int, int]]:
        """The token ranges of a document's pieces from token `begin` on, and how many tokens before each are its
        context. ends: 0, and where each of its texts ends. Raises ConfigError unless a window begins at `begin`."""
        all_windows = (
            (start + first, start + last, min(first, self.overlap))
            for start, stop in pairwise(ends)
            for first, last in windows(stop - start, self.length, self._place(column + start), self.overlap)
        )
        left = [window for window in all_windows if window[0] >= begin]
        if begin and (not left or left[0][0] != begin):
            raise ConfigError(
                f"stream {self.stream} cannot start at token {begin} of a document with rows of {self.length} "
                "tokens. Resume with the batch settings of the run that created the store."
            )
        return left

    def _placed(self, pieces: Sequence[_Piece]) -> Placement:
        sizes = np.array([piece.size for piece in pieces], np.int64)
        if self.packing is Packing.concat:
            return join(sizes, self.rows_per_block, self.length)
        if self.packing is Packing.pad:
            return pad(sizes, self.rows_per_block)
        piece_costs, capacity = sizes, self.length
        if self.selection is not None:
            piece_costs, capacity = costs(self.selection, sizes, [piece.chosen for piece in pieces], self.length)
        placement = pack(sizes, self.rows_per_block, self.length, piece_costs, capacity)
        # Only of the pieces in the block: how many more have been read must not matter.
        if any(piece.document.document.breaks for piece in pieces[: placement.num_pieces]):
            return pack_in_order(sizes, self.rows_per_block, piece_costs, capacity)
        return placement

    def _block(
        self,
        index: int,
        start: Cursor,
        placement: Placement,
        taken: Sequence[_Piece | SkippedDocument],
        following: _Piece | None,
    ) -> TokenBlock:
        """The block of the items `taken`. `following`: the next piece; None if the stream is exhausted."""
        pieces = [item for item in taken if isinstance(item, _Piece)]
        numbers = np.array([self._number(piece) for piece in pieces], np.int64)
        labels = [piece.labels for piece in pieces]
        if any(part is not None for part in labels):  # an Extractor's documents may be chats and texts
            nothing = [np.zeros((piece.size, len(Label)), np.int16) for piece in pieces]
            labels = [zeros if part is None else part for part, zeros in zip(labels, nothing, strict=True)]
        else:
            labels = []
        contexts = [piece.context for piece in pieces]
        rows = fill(placement, [piece.tokens for piece in pieces], numbers, self.length, labels, contexts)
        selected, num_selected = None, None
        if self.selection is not None:
            chosen = [piece.chosen for piece in pieces]
            selected, num_selected = selected_slots(placement, chosen, self.selection.slots)
        num_documents = pieces[-1].cursor.ordinal + 1 if pieces else start.ordinal
        end = Cursor(shard=self.documents.num_shards, ordinal=num_documents)
        return TokenBlock(
            stream=self.stream,
            index=index,
            **rows,
            selected=selected,
            table=self._table(pieces, num_selected),
            skipped=tuple(item for item in taken if isinstance(item, SkippedDocument)),
            start=start,
            next=end if following is None else following.cursor,
            exhausted=following is None,
        )

    def _number(self, piece: _Piece) -> int:
        """The document's number in the store."""
        return piece.cursor.ordinal * self.num_streams + self.stream

    def _table(self, pieces: Sequence[_Piece], num_selected: Int64[np.ndarray, " P"] | None) -> pa.Table:
        """The document table: one row per document. A document's pieces in a block are contiguous."""
        first = {self._number(piece): piece for piece in reversed(pieces)}
        last = {self._number(piece): piece for piece in pieces}
        documents = [piece.document for piece in last.values()]
        columns: dict[str, list] = {
            "document": list(last),
            "id": [item.document.id for item in documents],
            "source": [item.document.source for item in documents],
            "index": [item.document.index for item in documents],
            "n_tokens": [len(item.tokens) + item.num_cut for item in documents],
            "n_cut": [item.num_cut for item in documents],
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
        for name in self.documents.info_schema.names:
            columns[name] = [item.document.info.get(name) for item in documents]
        return pa.table(columns, schema=pa.unify_schemas([schema, self.documents.info_schema]))
