"""The types shared by the stages from documents to blocks of token rows, and documents of token ids.

`data.tokens` takes token ids from a column of the data as they are. Columns beside it are read if they exist:
`attention_mask`, which is 0 for padding, and for rows of several packed texts `position_ids`, which begin again with 0,
or `seq_lengths`.

Shapes: R rows per block (at most `rows_per_block`), T positions per row (`batch.length`), K slots per row for selected
tokens.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int16, Int32, Int64

from pipeline.config.choices import OnError
from pipeline.core.errors import InputError
from pipeline.data.text.labels import Labels

MASK, _POSITIONS, _LENGTHS = "attention_mask", "position_ids", "seq_lengths"
_LARGEST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Document:
    """One text with an id.

    source, index: its file (or source shard), and its row in that, from 0. info: the source's own columns.
    answer: the correct completion, if the source has it; it is not stored. labels: of the text's characters. tokens:
    its ids, from a column of the data, in place of the text. breaks: where in these further texts begin.
    """

    id: str
    text: str
    source: str
    index: int
    info: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    answer: str | None = None
    labels: Labels | None = None
    tokens: Int32[np.ndarray, "_"] | None = None
    breaks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SkippedDocument:
    """What `data.on_error=skip` left out, and the reason: the source's row `index`, or `rows` rows from there on. rows:
    None if their number is unknown, as after the damage in a compressed file."""

    source: str
    index: int
    reason: str
    rows: int | None = 1

    def if_allowed(self, on_error: OnError, where: str, remedy: str) -> "SkippedDocument":
        """This skip. Raises InputError unless skips are allowed. where, remedy: for the message."""
        if on_error is OnError.fail:
            raise InputError(f"{where}: {self.reason}. {remedy}, or set data.on_error=skip.")
        return self


def token_columns(tokens: str, names: Collection[str]) -> list[str]:
    """The columns to read of those that the data has."""
    return [tokens, *({MASK, _POSITIONS, _LENGTHS} & {*names})]


def is_ids(kind: pa.DataType) -> bool:
    """Whether a column's type is a list of integers."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)


def with_tokens(document: Document, row: Mapping[str, Any], column: str) -> Document:
    """The document with the ids of a row, without padding, and its breaks. Raises ValueError if they are no list of
    integers, or do not fit the columns beside them. Whether the model has them is checked with all documents'."""
    ids = _integers(row.get(column), column)
    mask, positions, lengths = (
        _integers(row[name], name, kinds="iub") if row.get(name) is not None else None
        for name in (MASK, _POSITIONS, _LENGTHS)
    )
    for name, values in ((MASK, mask), (_POSITIONS, positions)):
        if values is not None and values.shape != ids.shape:
            raise ValueError(f"{name!r} has {len(values)} values for the {len(ids)} tokens in {column!r}")
    begins = np.zeros(len(ids), bool)
    if positions is not None:
        begins = positions == 0
    elif lengths is not None:
        if lengths.sum() != len(ids) or (len(lengths) and lengths.min() < 1):
            raise ValueError(f"{_LENGTHS!r} sums to {lengths.sum()}, but {column!r} has {len(ids)} tokens")
        begins[np.cumsum(lengths)[:-1]] = True
    if mask is not None:
        if not {0, 1}.issuperset(mask.tolist()):
            raise ValueError(f"{MASK!r} is not 0 or 1 for each token")
        texts = np.cumsum(begins)[mask == 1]  # a text may begin with padding
        ids, begins = ids[mask == 1], np.diff(texts, prepend=texts[:1]) > 0
    if not len(ids):
        raise ValueError(f"{column!r} has no tokens")
    if not 0 <= ids.min() <= ids.max() <= _LARGEST:
        raise ValueError(f"{column!r} has the token ids {ids.min()} to {ids.max()}, expected 0 to {_LARGEST}")
    breaks = tuple((np.flatnonzero(begins[1:]) + 1).tolist())
    return replace(document, tokens=ids.astype(np.int32), breaks=breaks)


def _integers(values: Any, column: str, kinds: str = "iu") -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths
        array = np.empty(())
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        raise ValueError(f"{column!r} is {str(values)[:80]!r}, expected a list of integers")
    return array.astype(np.int64)


@runtime_checkable
class Source(Protocol):
    """An ordered list of source shards, each an ordered list of documents. The same config gives the same documents.

    shards: names that do not depend on the data's location, such as relative paths. Stream s reads shards s,
    s + num_streams, s + 2 num_streams, ...
    info_schema: the names and types of the columns of `Document.info`.
    """

    shards: tuple[str, ...]
    info_schema: pa.Schema

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        """The documents of `shards[shard]` whose `index` is at least `start`. Skipped rows count in the index.

        Raises InputError (naming file and row) for a bad row or a damaged file, unless the config says to skip these
        and the source can; PipelineError for a file that cannot be reached, in any case.
        """

    def fingerprint(self) -> dict[str, object]:
        """What determines the documents, as plain JSON values that do not depend on machine and time."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position in a stream at which a block starts.

    shard: the number of the stream's source shards that are finished. document: the row in the current one. token: the
    number of that document's tokens in earlier blocks. ordinal: the number of the stream's earlier documents.
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

# Additional columns if tokens are selected: the numbers of selected tokens with a slot in the block, and without one.
SELECTED_FIELDS = (pa.field("n_selected", pa.int64()), pa.field("n_unselected", pa.int64()))


@dataclass(frozen=True)
class TokenBlock:
    """Consecutive rows of one stream: the unit of writing, committing and resuming.

    The arrays only have the R rows with tokens.
    documents: -1 in padding, and for the tokens that a window repeats as context (`batch.overlap`).
    labels: of the tokens, in the order of `Label`, 0 in padding; None for documents that are not conversations, and
    in a block without rows.
    selected: the positions, within their row, of the tokens whose activations are stored: ascending, -1 in unused
    slots. None if all are stored.
    table: one row per document with tokens in the block, ordered by document number. Its columns are those of
    `DOCUMENT_SCHEMA`: document, id, source, index, n_tokens (of the whole document), n_cut (tokens dropped by
    `batch.long_documents=cut`), first_token and last_token (half-open range of the document's tokens in this block);
    then those of `SELECTED_FIELDS` if tokens are selected, and the source's own columns.
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
    exhausted: bool  # the stream has no more documents after this block
    labels: Int16[np.ndarray, "R T 5"] | None = None

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_tokens(self) -> int:
        """The number of the documents' tokens, without padding and context."""
        return int(np.count_nonzero(self.documents >= 0))

    @property
    def stored(self) -> Bool[np.ndarray, "R slots"]:
        """Which slots have an activation: [R, T], or [R, K] if tokens are selected."""
        return self.segments != 0 if self.selected is None else self.selected >= 0
