"""The types that the data stages hand to each other: documents in, blocks of token rows out.

Shapes: R rows of a block (at most `rows_per_block`), T positions of a row (`batch.length`), K slots of a row for
selected tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int32, Int64


@dataclass(frozen=True, slots=True)
class Document:
    """One text with an id. `source` and `index` say where it stands: file (or source shard), row within it (from 0).

    `answer` is what a right completion says, where the source knows it; it is not stored.
    """

    id: str
    text: str
    source: str
    index: int
    info: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class SkippedDocument:
    """A document that `data.on_error=skip` left out, and why."""

    source: str
    index: int
    reason: str


@runtime_checkable
class Source(Protocol):
    """An ordered list of source shards, each an ordered list of documents. Pure: the same config reads the same.

    `shards` are names that do not depend on where the data lies (relative paths), in the order in which they are
    divided among streams: stream s reads shards s, s + num_streams, s + 2 num_streams, ...
    `info_schema` names and types the columns of `Document.info`.
    """

    shards: tuple[str, ...]
    info_schema: pa.Schema

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        """The documents of `shards[shard]` whose `index` is at least `start`. A row that is skipped keeps its index.

        Raises InputError (naming file and row) for a bad row or a damaged file unless the config says skip and the
        source can, and PipelineError for a file that cannot be reached, whatever the config says.
        """

    def fingerprint(self) -> dict[str, object]:
        """What determines the documents: plain JSON values, independent of machine and time."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a stream's next block starts.

    shard: how many source shards of the stream are done. document: row within the current one. token: tokens of that
    document that are already in earlier blocks. ordinal: how many documents the stream had before this one.
    """

    shard: int = 0
    document: int = 0
    token: int = 0
    ordinal: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


STREAM_START = Cursor()

DOCUMENT_SCHEMA = pa.schema(
    [
        ("document", pa.int64()),
        ("id", pa.string()),
        ("source", pa.string()),
        ("index", pa.int64()),
        ("n_tokens", pa.int64()),
        ("n_cut", pa.int64()),
        ("first_token", pa.int64()),
        ("last_token", pa.int64()),
    ]
)


# Besides, where not all tokens are selected: whose activations the block holds, and for whose it has no room.
SELECTED_FIELDS = (pa.field("n_selected", pa.int64()), pa.field("n_unselected", pa.int64()))


@dataclass(frozen=True)
class TokenBlock:
    """Consecutive rows of one stream: the unit of writing, committing and resuming.

    The arrays hold only the R rows that have tokens. `selected` are the row positions of the tokens whose activations
    are stored, ascending, -1 where there are fewer than K; None for all tokens. `table` has one row per document with
    tokens in the block, ordered by document number, with the columns of `DOCUMENT_SCHEMA`: document, id, source, index,
    n_tokens (of the whole document), n_cut (tokens dropped by `batch.long_documents=cut`), first_token and last_token
    (half-open range of the document's tokens in this block), with `selected` those of `SELECTED_FIELDS`, then the
    source's own columns.
    """

    stream: int
    index: int
    tokens: Int32[np.ndarray, "R T"]
    segments: Int32[np.ndarray, "R T"]
    positions: Int32[np.ndarray, "R T"]
    documents: Int64[np.ndarray, "R T"]
    selected: Int32[np.ndarray, "R K"] | None
    table: pa.Table
    skipped: tuple[SkippedDocument, ...]
    start: Cursor
    next: Cursor
    exhausted: bool  # the stream has no document after this block
    truncated: bool  # `run.max_tokens` ended the block early: a longer run computes it again, with the same first rows

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Valid (not padding) tokens."""
        return int(np.count_nonzero(self.segments))

    @property
    def stored(self) -> Bool[np.ndarray, "R slots"]:
        """Which slots hold an activation: [R, T], or [R, K] with `selected`."""
        return self.segments != 0 if self.selected is None else self.selected >= 0
