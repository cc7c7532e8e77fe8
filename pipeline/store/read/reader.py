"""Reading a store: rows, documents, and batches of tokens for training.

    from pipeline.store import ActivationStore

    store = ActivationStore.open("gs://bucket/store")
    for batch in store.batches("blocks.5.resid_post", batch_size=4096, shuffle=True, seed=0):
        train_step(batch.activations)  # [4096, d]

Reads finished and unfinished stores. It reads the blocks that were committed when it was opened, whatever a job does
meanwhile; `refresh` opens the later ones.
Shapes: T positions per row, S slots per row for activations (T, or fewer if `capture.positions` stores only some
tokens' activations), D features per activation.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsIndex

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
import pyarrow as pa
import tensorstore as ts
from jaxtyping import Int16, Int32, Int64

from pipeline.core import arguments
from pipeline.core.arguments import flag, integer, path
from pipeline.core.errors import ArgumentError, StoreError
from pipeline.core.messages import counted, shown
from pipeline.core.sites import ActivationKey, ByName, Site
from pipeline.store.format.arrays import layout_of, open_arrays
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import SEGMENTS, SELECTED
from pipeline.store.format.metadata import StoreMetadata, StoreRoot, require_root
from pipeline.store.format.statistics import Normalisation, Statistics
from pipeline.store.format.summary import read_blocks
from pipeline.store.io.storage import Storage, StorageLike
from pipeline.store.read.batches import BatchReader, HasBatches
from pipeline.store.read.buffers import Stores
from pipeline.store.read.documents import DocumentActivations, Labels, StoredDocuments, document_slots
from pipeline.store.read.frameworks import STORED, Dtype, cast, feature_batches, parsed_dtype
from pipeline.store.read.gathering import Batch, sample_statistics
from pipeline.store.read.options import ArrayNames, BatchOptions, Key, TokenFilter, as_keys
from pipeline.store.read.rows import Rows, StoredRows, is_one_row, require_positions, slot_side_arrays
from pipeline.store.read.shard_reads import REMOTE_REQUESTS, ShardReads, store_id
from pipeline.store.read.stored_statistics import HasStatistics

# The size of the shuffle buffer from which `sample` takes tokens.
SAMPLE_BUFFER_MIB = 64.0


@dataclass(frozen=True)
class TokenRows:
    """The side arrays of n rows: [n, S], or [S] for one row.

    segments: k in the row's k-th document window, 0 where there is no token. positions: start at 0 in each window.
    documents: the document's number, -1 where there is no token. labels: of a store of conversations.
    """

    tokens: Int32[np.ndarray, "*n S"]
    segments: Int32[np.ndarray, "*n S"]
    positions: Int32[np.ndarray, "*n S"]
    documents: Int64[np.ndarray, "*n S"]
    labels: Int16[np.ndarray, "*n S 5"] | None = None


class ActivationStore(HasBatches, HasStatistics):
    """A store, open for reading. Use `ActivationStore.open`.

    path: as given; on the Hub, with the commit.
    metadata: what determines the store's content. complete: whether the store has all blocks.
    keys: the stored activations. layers, sites: the layers and sites among them.
    length: token positions per row. slots: slots per row for activations; `length`, or fewer if only some tokens'
    activations are stored.
    blocks: the committed blocks, in row order.
    weights_error: the relative error caused by quantised weights, by array name: `relative_error` of all tokens
    together, and `token_median`; None without them.
    cache_error: the relative error caused by int8 keys and values (data=generate), by array name and for final_norm.
    storage: the store's storage.
    """

    def __init__(self, storage: Storage, root: StoreRoot, blocks: BlockTable) -> None:
        self.metadata: StoreMetadata = root.metadata
        self.complete: bool = root.complete
        self.weights_error: Mapping[str, Mapping[str, float | None]] | None = root.weights_error
        self.cache_error: Mapping[str, Mapping[str, float | None]] | None = root.cache_error
        self.keys: tuple[ActivationKey, ...] = tuple(ActivationKey.parse(name) for name in root.arrays)
        self.storage = storage
        self.blocks = blocks
        self._root = root
        self._layout = layout_of(root)
        self.layers: tuple[int, ...] = tuple(sorted({key.layer for key in self.keys if key.site.per_layer}))
        self.sites: tuple[Site, ...] = tuple(dict.fromkeys(key.site for key in self.keys))
        self.length: int = self._layout.length
        self.slots: int = self._layout.slots
        self._reads = ShardReads(storage, self._layout, store_id(root))
        self._rows = StoredRows(self._reads, blocks)
        self._documents = StoredDocuments(storage, root, blocks)

    @classmethod
    def open(cls, address: StorageLike) -> "ActivationStore":
        """Opens the store at a local path, `gs://`, `s3://`, `memory://` or `hf://datasets/owner/name[@revision]`, or
        in a Storage, with its options.

        Raises StoreInvalid if there is no store, or if it is damaged or of a different format version, and StoreError
        if it cannot be reached.
        """
        storage = _storage(address if isinstance(address, Storage) else path("the address of the store", address))
        root = require_root(storage)
        return cls(storage, root, read_blocks(storage, root))

    def refresh(self) -> "ActivationStore":
        """Opens the store again, with the blocks that are committed now. This reader keeps its own.

        Raises StoreInvalid if the store was deleted, whether or not there is another one now, and StoreError.
        """
        self._reads.require_same_store()
        return ActivationStore.open(self.storage)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads the same blocks, with the default options of storage."""
        return _unpickled, (self.path, self._root, self.blocks)

    @cached_property
    def arrays(self) -> Mapping[str, ts.TensorStore]:
        """The TensorStore arrays by name, with the stored values, for other ways of reading."""
        return open_arrays(self.storage, self._layout, self._rows.end)

    def __repr__(self) -> str:
        arrays = ", ".join([*(key.name for key in self.keys), *self._feature_widths]) or "no activations"
        extent = f"{self.num_tokens:,} tokens in {counted(len(self.blocks), 'block')}"
        extent += "" if self.complete else ", unfinished"
        return f"ActivationStore({self.path!r}: {arrays}; {extent})"

    @cached_property
    def num_tokens(self) -> int:
        """The number of stored tokens, without padding."""
        return self.blocks.total("tokens")

    @cached_property
    def num_activations(self) -> int:
        """The number of tokens whose activations are stored: all of them, unless `capture.positions` selects some."""
        return self.blocks.total("activations")

    @property
    def rows(self) -> Int64[np.ndarray, " n"]:
        """The numbers of the stored rows, ascending. All other rows of an array are padding."""
        return self._rows.numbers

    def documents(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The document tables: one row per document and block with tokens of it.

        The columns are stream, block and those of `_documents`: document, id, source, index, n_tokens, n_cut,
        first_token, last_token, and the source's own. columns: read only these; None for all.
        """
        columns = None if columns is None else arguments.names("columns", columns)
        table = self._documents.read(columns=columns)
        self._reads.require_same_store()
        return table

    def labels(self, column: str, table: pa.Table | None = None) -> Labels:
        """The values of a column of `documents`, or of another table with a column `id`, by document:
        `labels[batch.documents]` are those of a batch's tokens. Of several rows of an id, the first counts."""
        if not isinstance(column, str) or not (table is None or isinstance(table, pa.Table)):
            raise ArgumentError(f"expected a column and a pyarrow.Table, got {shown(column)} and {shown(table)}.")
        labels = self._documents.labels(column, table)
        self._reads.require_same_store()
        return labels

    def read(self, key: Key, rows: Rows, dtype: Dtype = None) -> np.ndarray:
        """Activations [n, S, D] of n rows ([S, D] for one), zeros where there is no token.

        key: the array, e.g. "blocks.2.resid_post".
        rows: row numbers, as in `store.rows`; a slice selects the stored rows in its range.
        dtype: None for the store's, but float32 if that is narrower; "stored"; or another floating-point dtype. Raises
        StoreError for a row that is not stored or damaged.
        """
        dtype = parsed_dtype(dtype)
        [values] = self._rows.read([self._names.key(key).name], self._rows.chosen(rows)).values()
        return cast(values[0] if is_one_row(rows) else values, dtype)

    def tokens_at(
        self, rows: Rows, positions: Rows, keys: Key | Sequence[Key] | None = None, dtype: Dtype = None
    ) -> Batch:
        """n tokens in any order, given by their rows and their positions within these, as a batch. Only chunks with
        these tokens are read.

        rows, positions: [n]. keys: as in `batches`; None for all. dtype: as in `read`. Raises StoreError for padding
        and for a token whose activations are not stored, and ArgumentError.
        """
        numbers, dtype = self._rows.chosen(np.atleast_1d(rows)), parsed_dtype(dtype)
        places = np.atleast_1d(positions)
        if places.shape != numbers.shape or (places.size and places.dtype.kind not in "iu"):
            raise ArgumentError(
                f"positions is {shown(positions)}, expected an integer for each of {len(numbers)} rows."
            )
        if places.size and not 0 <= places.min() <= places.max() < self.length:
            raise ArgumentError(f"positions are {places.min()} to {places.max()}, expected 0 to {self.length - 1}.")
        names, slots = [key.name for key in self._keys(keys)], places.astype(np.int64)
        tokens = self._rows.read(
            [spec.name for spec in self._layout.side_arrays if spec is not SELECTED], numbers, slots
        )
        is_stored = tokens[SEGMENTS.name] > 0
        if self._layout.selected is not None:
            distinct, index = np.unique(numbers, return_inverse=True)
            fits = self.read_selected(distinct)[index] == slots[:, None]
            slots, is_stored = fits.argmax(axis=1), fits.any(axis=1)
        if not is_stored.all():
            absent = np.flatnonzero(~is_stored)[:4]
            pairs = list(zip(numbers[absent].tolist(), places[absent].tolist(), strict=True))
            raise StoreError(f"{self.path} has no activations at the (row, position) pairs {pairs}.")
        arrays = self._rows.read(names, numbers, slots)
        activations = ByName((name, cast(values, dtype)) for name, values in arrays.items())
        return Batch(activations[names[0]] if isinstance(keys, Key) else activations, **tokens)

    def read_tokens(self, rows: Rows, whole: bool = False) -> TokenRows:
        """Tokens, segments, positions, documents and labels of some rows, in the same slots as their activations.

        rows: as in `read`. whole: return all positions (S = T), even if only some tokens' activations are stored.
        """
        row_numbers = self._rows.chosen(rows)
        left_out = SELECTED if flag("whole", whole) else None
        specs = (spec for spec in self._layout.side_arrays if spec is not left_out)
        sides = slot_side_arrays(self._rows.read([spec.name for spec in specs], row_numbers))
        return TokenRows(**{name: values[0] if is_one_row(rows) else values for name, values in sides.items()})

    def read_selected(self, rows: Rows) -> Int32[np.ndarray, "*n S"]:
        """The positions, within their row, of the tokens whose activations `read` returns; -1 in slots without one."""
        row_numbers = self._rows.chosen(rows)
        if self._layout.selected is not None:
            selected = self._rows.read([SELECTED.name], row_numbers)[SELECTED.name]
            require_positions(selected, self.length)
        else:
            segments = self._rows.read([SEGMENTS.name], row_numbers)[SEGMENTS.name]
            selected = np.where(segments > 0, np.arange(self.length, dtype=np.int32), np.int32(-1))
        return selected[0] if is_one_row(rows) else selected

    def read_outputs(
        self, rows: Rows, names: Collection[str] | None = None, dtype: Dtype = None
    ) -> dict[str, np.ndarray]:
        """The arrays of `capture.outputs` and of SAEs for some rows, by array name; {} for a store without these.

        rows, dtype: as in `read`. names: the arrays to read; None for all.
        Shapes: [n, S], or [n, S, k] for the k likeliest next tokens or k features; [S] or [S, k] for one row. Values
        are 0 where there is no token, and a feature's index is -1. Raises StoreError for an unknown name.
        """
        stored, dtype = [spec.name for spec in self._layout.outputs], parsed_dtype(dtype)
        wanted = stored if names is None else arguments.names("names", names)
        if unknown := sorted(set(wanted) - set(stored)):
            raise StoreError(f"{self.path} has no outputs {unknown}; it has {stored} (capture.outputs).")
        outputs = self._rows.read([name for name in stored if name in wanted], self._rows.chosen(rows))
        return {name: cast(values[0] if is_one_row(rows) else values, dtype) for name, values in outputs.items()}

    def document(
        self, id: str | SupportsIndex, keys: Key | Sequence[Key] | None = None, dtype: Dtype = None
    ) -> DocumentActivations:
        """One document, given its id (str) or number (int), with the activations of `keys` (default: all).

        dtype: as in `read`.

        A document longer than a row consists of several windows, each computed separately; they are concatenated.
        Raises StoreError for an unknown id or number, or an id that several documents have.
        """
        names, dtype = [key.name for key in self._keys(keys)], parsed_dtype(dtype)
        number, id = self._documents.find(id if isinstance(id, str) else integer("id", id))
        rows = self._rows.row_numbers(self._documents.blocks_with(number))
        specs = (spec for spec in self._layout.side_arrays if spec is not SEGMENTS)
        slots, fields = document_slots(number, rows, self._rows.read([spec.name for spec in specs], rows))
        outputs = [spec.name for spec in self._layout.outputs]
        values = self._rows.read([*names, *outputs], fields["rows"], slots)
        values = {name: cast(array, dtype) for name, array in values.items()}
        activations, outputs = ByName((name, values[name]) for name in names), {name: values[name] for name in outputs}
        features = feature_batches(self._feature_widths, outputs)
        return DocumentActivations(number, id, activations, outputs, features, **fields)

    def _stored(
        self,
        keys: Key | Sequence[Key],
        options: BatchOptions,
        normalisation: Mapping[str, Normalisation] | None = None,
    ) -> tuple[Stores, BlockTable]:
        return [(self._reads, self._names.batch_arrays(keys, options, normalisation))], self.blocks

    def sample(
        self,
        keys: Key | Sequence[Key],
        num_tokens: int = 65536,
        seed: int = 0,
        token_filter: TokenFilter | None = None,
    ) -> dict[str, Statistics]:
        """Statistics of the activations `keys`, by array name, from the first `num_tokens` tokens in random order.

        The same arguments give the same sample. Raises ArgumentError if no token passes the filter.
        """
        options = BatchOptions(
            **dict(batch_size=4096, shuffle=True, seed=seed, token_filter=token_filter, dtype=STORED),
            buffer_mib=SAMPLE_BUFFER_MIB,
        )
        with closing(BatchReader(*self._stored(as_keys(keys), options), options)) as batches:
            return sample_statistics(batches, integer("num_tokens", num_tokens, 1))

    def _keys(self, keys: Key | Sequence[Key] | None) -> Sequence[ActivationKey]:
        return self.keys if keys is None else [self._names.key(key) for key in as_keys(keys)]

    @cached_property
    def _names(self) -> ArrayNames:
        subject = f"the store {self.path}"
        return ArrayNames(subject, self._layout, self._feature_widths, StoreError, self._root.hook_names)


def _storage(address: StorageLike) -> Storage:
    """The storage at an address. For a remote one, with as many concurrent requests as readers need."""
    storage = Storage.open(address)
    return storage.with_own_requests(REMOTE_REQUESTS) if storage.is_remote and storage is not address else storage


def _unpickled(path: str, root: StoreRoot, blocks: BlockTable) -> ActivationStore:
    return ActivationStore(_storage(path), root, blocks)
