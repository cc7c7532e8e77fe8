"""Reading a store: rows, documents, and batches of tokens for training.

    from pipeline.store import ActivationStore

    store = ActivationStore.open("gs://bucket/store")
    for batch in store.batches((5, "resid_post"), batch_size=4096, shuffle=True, seed=0):
        train_step(batch.activations)  # [4096, d]

Reads finished and unfinished stores. Of an unfinished store it reads the blocks that were committed when it was opened.
Shapes: T positions per row, S slots per row for activations (T, or fewer if `capture.positions` stores only some
tokens' activations), D features per activation.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, SupportsIndex

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorstore as ts
from jaxtyping import Int32, Int64

from pipeline.core import arguments
from pipeline.core.addresses import HUB_SCHEME
from pipeline.core.arguments import flag, integer, path, shown
from pipeline.core.counts import counted
from pipeline.core.errors import ArgumentError, StoreError, StoreInvalid
from pipeline.core.sites import ActivationKey, ByName, Site, find_array, spelled
from pipeline.store.features.firings import FeatureIndexes, FeatureStatistics, Firings
from pipeline.store.format.arrays import open_existing, require_layout
from pipeline.store.format.block_table import BlockTable, join_streams, read_streams, read_table
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.keys import features_name
from pipeline.store.format.layout import DOCUMENTS, POSITIONS, SEGMENTS, SELECTED, SIDE_ARRAYS, TOKENS
from pipeline.store.format.metadata import StoreMetadata, StoreRoot, require_root
from pipeline.store.format.normalisation import Normalisation
from pipeline.store.format.statistics import Statistics, merge_streams, read_merged
from pipeline.store.io.storage import Storage, StorageLike
from pipeline.store.read.batch_options import BatchOptions, Key, Readable, Reading, as_keys
from pipeline.store.read.batches import BatchReader, BatchSource, HasBatches
from pipeline.store.read.documents import DocumentActivations, StoredDocuments, document_slots
from pipeline.store.read.features import feature_batches
from pipeline.store.read.filters import TokenFilter
from pipeline.store.read.frameworks import STORED, Dtype, cast, parsed_dtype
from pipeline.store.read.gathering import sample_statistics
from pipeline.store.read.order import ReadingOrder
from pipeline.store.read.rows import slot_side_arrays
from pipeline.store.read.stored_objects import StoredObjects
from pipeline.store.read.stored_rows import Rows, StoredRows, is_one_row

# The size of the shuffle buffer from which `sample` takes tokens.
SAMPLE_BUFFER_MIB = 64.0

# A reader's concurrent requests to a remote store: side arrays of many blocks are read along with activations.
REMOTE_REQUESTS = 128


@dataclass(frozen=True)
class TokenRows:
    """The side arrays of n rows: [n, S], or [S] for one row.

    segments: k in the row's k-th document window, 0 where there is no token. positions: start at 0 in each window.
    documents: the document's number, -1 where there is no token.
    """

    tokens: Int32[np.ndarray, "*n S"]
    segments: Int32[np.ndarray, "*n S"]
    positions: Int32[np.ndarray, "*n S"]
    documents: Int64[np.ndarray, "*n S"]


class ActivationStore(HasBatches):
    """A store, open for reading. Use `ActivationStore.open`.

    path: as given; on the Hub, with the commit.
    metadata: what determines the store's content. complete: whether the store has all blocks.
    keys: the stored activations. layers, sites: the layers and sites among them.
    length: token positions per row. slots: slots per row for activations; `length`, or fewer if only some tokens'
    activations are stored.
    blocks: the committed blocks, in row order.
    weights_error: the relative error caused by int8 weights, by array name: `relative_error` of all tokens together,
    and `token_median`; None without them.
    cache_error: the relative error caused by int8 keys and values (data=generate), by array name and for final_norm.
    arrays: the TensorStore arrays by name, with the stored values, for other ways of reading.
    storage: the store's storage.
    """

    def __init__(
        self,
        storage: Storage,
        root: StoreRoot,
        blocks: BlockTable,
        last: Sequence[CommitRecord],
        arrays: Mapping[str, ts.TensorStore],
    ) -> None:
        """last: the record of each stream's last block, for an unfinished store."""
        self.path = storage.path
        self.metadata: StoreMetadata = root.metadata
        self.complete: bool = root.complete
        self.weights_error: Mapping[str, Mapping[str, float | None]] | None = root.weights_error
        self.cache_error: Mapping[str, Mapping[str, float | None]] | None = root.cache_error
        self.keys: tuple[ActivationKey, ...] = tuple(ActivationKey.parse(name) for name in root.arrays)
        self.arrays = arrays
        self.storage = storage
        self._statistics_digests = root.statistics_digests or {}
        self._feature_widths = {sae["features"]: sae["width"] for sae in root.metadata.encoders}
        self._layout = require_layout(root, arrays, storage.path)
        self.layers: tuple[int, ...] = tuple(sorted({key.layer for key in self.keys if key.site.per_layer}))
        self.sites: tuple[Site, ...] = tuple(dict.fromkeys(key.site for key in self.keys))
        self.length: int = self._layout.length
        self.slots: int = self._layout.slots
        self.blocks = blocks
        self._last = last
        self._objects = StoredObjects(storage, self._layout, arrays)
        self._rows = StoredRows(self._objects, blocks)
        self._documents = StoredDocuments(storage, self.blocks, self.metadata.num_streams)

    @classmethod
    def open(cls, address: StorageLike) -> "ActivationStore":
        """Opens the store at a local path, `gs://`, `s3://`, `memory://` or `hf://datasets/owner/name[@revision]`, or
        in a Storage, with its options.

        Raises StoreInvalid if there is no store, or if it is damaged or of a different format version, and StoreError
        if it cannot be reached.
        """
        address = address if isinstance(address, Storage) else path("the address of the store", address)
        storage = Storage.open(address)
        if storage.is_remote and storage is not address:
            storage = storage.with_own_requests(REMOTE_REQUESTS)
        return storage.retry_read(lambda: cls._open(storage))

    @classmethod
    def _open(cls, storage: Storage) -> "ActivationStore":
        root = require_root(storage)
        arrays = open_existing(storage, root.array_names, root.array_digests or {})
        blocks, last = _read_blocks(storage, root)
        counts = tuple(np.bincount(blocks.column("stream"), minlength=root.metadata.num_streams).tolist())
        if root.blocks is not None and counts != root.blocks:
            raise StoreInvalid(
                f"{storage.path} was completed with {sum(root.blocks)} blocks, but has records of {sum(counts)}, or of "
                "blocks in other streams. Run the job again to compute missing blocks, or pipeline.verify to list "
                "them."
            )
        return cls(storage, root, blocks, last, arrays)

    def __reduce_ex__(self, protocol: int) -> str | tuple[Any, ...]:
        """Unpickling opens a store on the Hub again, at its commit with default options: each process has a relay."""
        if self.path.startswith(HUB_SCHEME):
            return ActivationStore.open, (self.path,)
        return super().__reduce_ex__(protocol)

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

    @property
    def documents(self) -> pa.Table:
        """The document tables of all blocks: one row per document and block with tokens of it.

        The columns are stream, block and those of `_documents`: document, id, source, index, n_tokens, n_cut,
        first_token, last_token, and the source's own.
        """
        return self._documents.table

    def statistics(self, layer: Key | SupportsIndex | None, site: Site | str | None = None) -> Statistics:
        """Statistics of an array over all its stored tokens: each feature's mean and variance, and the norms.

        layer, site: as in `read`. Raises StoreError for a store made with capture.statistics=false.
        """
        return self._merged_statistics(self._key(layer, site).name)

    def _merged_statistics(self, name: str) -> Statistics:
        if not self.complete:
            statistics = merge_streams(self.storage, self._last).get(name)
        elif digest := self._statistics_digests.get(name):
            statistics = read_merged(self.storage, name, digest)
        else:  # any stored statistics are of fewer blocks
            statistics = None
        if statistics is None:
            raise StoreError(f"{self.path} has no statistics of {name}: it was made with capture.statistics=false.")
        return statistics

    def feature_statistics(self, name: Key) -> FeatureStatistics:
        """How often and how strongly each feature of an SAE fires, over all tokens whose features are stored. With
        capture.encode_error, also how well the SAE reconstructs the activations.

        name: the array that the SAE encodes, e.g. "blocks.5.resid_post"; followed by ".<SAE's name>" if several encode
        it. Raises StoreError if there is no such SAE, and for a store without statistics of features.
        """
        features = self._features_name(name)
        array = self.metadata.reconstructed.get(features)
        statistics = self._merged_statistics(features)
        return FeatureStatistics.of(statistics, None if array is None else self._merged_statistics(array))

    def feature(self, name: Key, feature: SupportsIndex, top: int | None = None) -> Firings:
        """The tokens for which one feature of an SAE fires, in storage order; with `top`, its `top` strongest firings.

        name: as in `feature_statistics`. Costs two small reads per block; with `top`, one per block and a second one
        for at most `top` blocks. Raises StoreError if there is no such SAE or feature, and for a store without an index
        by feature.
        """
        features = self._features_name(name)
        width = self._feature_widths[features]
        feature, top = integer("feature", feature), None if top is None else integer("top", top, 1)
        if feature >= width:
            raise StoreError(f"feature {feature} of {name}: the SAE has features 0 to {width - 1}.")
        if features not in self.metadata.indexed_features:
            raise StoreError(
                f"the store {self.path} has no index by feature: it was made with capture.encode_index=false. Read all "
                "features with batches(..., features=True)."
            )
        value_type = self.arrays[f"{features}.value"].dtype.numpy_dtype
        indexes = FeatureIndexes(self.storage, features, width, value_type, self._layout, self.blocks)
        return self.storage.retry_read(lambda: indexes.read(feature, top))

    def _features_name(self, name: Key) -> str:
        """The prefix of the names of an SAE's arrays."""
        hooks = {}
        for features in self._feature_widths:
            parts = features.removeprefix("features.").split(".")
            size = 3 if parts[0] == "blocks" else 1  # then the SAE's name, if several encode the array
            hook = ActivationKey.parse(".".join(parts[:size])).hook_name()
            hooks[".".join(parts)] = ".".join([hook, *parts[size:]])
        if (found := find_array(spelled(name), hooks)) is None:
            raise StoreError(
                f"the store {self.path} has no features of {name!r}; it has: {', '.join(hooks) or 'none'}."
            )
        return features_name(found)

    def normalisation(self, keys: Key | Sequence[Key], per_feature: bool = False) -> dict[str, Normalisation]:
        """The normalisation to zero mean and unit variance, by array name, from the stored statistics.

        See `Statistics.normalisation`. Raises StoreError for a store made with capture.statistics=false; use the
        statistics from `sample` there.
        """
        parsed, per_feature = [self._key(key) for key in as_keys(keys)], flag("per_feature", per_feature)
        return {key.name: self.statistics(key).normalisation(per_feature) for key in parsed}

    def read(
        self,
        layer: Key | SupportsIndex | None,
        site: Site | str | Rows | None = None,
        rows: Rows | None = None,
        dtype: Dtype = None,
    ) -> np.ndarray:
        """Activations [n, S, D] of n rows ([S, D] for one), zeros where there is no token.

        layer, site: the array; layer is None for sites that exist once. Or one key, as in `batches`:
        read("blocks.2.resid_post", rows).
        rows: row numbers, as in `store.rows`, or a mask of these; a slice selects the stored rows in its range.
        dtype: None for the store's, but float32 if that is narrower; "stored"; or another floating-point dtype. Raises
        StoreError for a row that is not stored or damaged.
        """
        site, rows = (None, site) if rows is None else (site, rows)
        dtype = parsed_dtype(dtype)
        [(_, values)] = self._rows.activations([self._key(layer, site).name], self._rows.chosen(rows))
        return cast(values[0] if is_one_row(rows) else values, dtype)

    def read_tokens(self, rows: Rows, whole: bool = False) -> TokenRows:
        """Tokens, segments, positions and documents of some rows, in the same slots as their activations.

        rows: as in `read`. whole: return all positions (S = T), even if only some tokens' activations are stored.
        """
        row_numbers = self._rows.chosen(rows)
        specs = SIDE_ARRAYS if flag("whole", whole) else self._layout.side_arrays
        sides = slot_side_arrays(dict(self._rows.reads([spec.name for spec in specs], row_numbers)))
        return TokenRows(**{name: values[0] if is_one_row(rows) else values for name, values in sides.items()})

    def read_selected(self, rows: Rows) -> Int32[np.ndarray, "*n S"]:
        """The positions, within their row, of the tokens whose activations `read` returns; -1 in slots without one."""
        row_numbers = self._rows.chosen(rows)
        if self._layout.selected is not None:
            selected = self._rows.read(SELECTED.name, row_numbers)
        else:
            segments = self._rows.read(SEGMENTS.name, row_numbers)
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
        outputs = self._rows.reads([name for name in stored if name in wanted], self._rows.chosen(rows))
        return {name: cast(values[0] if is_one_row(rows) else values, dtype) for name, values in outputs}

    def document(
        self, id: str | SupportsIndex, keys: Key | Sequence[Key] | None = None, dtype: Dtype = None
    ) -> DocumentActivations:
        """One document, given its id (str) or number (int), with the activations of `keys` (default: all).

        dtype: as in `read`.

        A document longer than a row consists of several windows, each computed separately; they are concatenated.
        Raises StoreError for an unknown id or number, or an id that several documents have.
        """
        names = [key.name for key in (self.keys if keys is None else map(self._key, as_keys(keys)))]
        number, dtype = None if isinstance(id, str) else integer("id", id), parsed_dtype(dtype)
        documents = self._documents
        by_id = documents.with_id(id) if isinstance(id, str) else None
        number = number if by_id is None else by_id["document"][0].as_py()
        blocks = documents.blocks_with(number)
        selects = self._layout.selected is not None
        sides = [TOKENS.name, POSITIONS.name, DOCUMENTS.name, *([SELECTED.name] if selects else [])]
        side_reads = self._rows.reads(sides, self._rows.row_numbers(blocks))  # in flight while the table is read
        entries = documents.with_number(number, blocks) if by_id is None else by_id
        expected = pc.sum(pc.subtract(entries["last_token"], entries["first_token"])).as_py()
        slots = document_slots(number, self._rows.row_numbers(blocks), dict(side_reads))
        if len(slots.text) != expected:
            raise StoreError(f"{self.path} has {len(slots.text)} tokens of document {number}, expected {expected}.")
        output_reads = self._rows.reads([spec.name for spec in self._layout.outputs], slots.rows)
        reads = self._rows.activations(names, slots.rows)
        activations = ByName((name, cast(values[slots.in_document], dtype)) for name, values in reads)
        outputs = {name: cast(values[slots.in_document], dtype) for name, values in output_reads}
        return DocumentActivations(
            document=number,
            id=entries["id"][0].as_py(),
            tokens=slots.tokens,
            positions=slots.positions,
            rows=np.repeat(slots.rows, slots.in_document.sum(axis=1)),
            activations=activations,
            outputs=outputs,
            features=feature_batches(self._feature_widths, outputs),
            text=slots.text,
            places=slots.places,
        )

    def __getitem__(self, key: Key) -> "StoredArray":
        """One array, whose rows are read when it is indexed: store["blocks.2.resid_post"][5]."""
        return StoredArray(self, self._key(key))

    def _batches(
        self,
        keys: Key | Sequence[Key],
        batch_size: int,
        normalisation: Mapping[str, Normalisation] | None,
        options: BatchOptions,
        state: Mapping[str, Any] | None,
    ) -> BatchReader:
        options = replace(options, normalisation=normalisation)
        source = self._source(self._readable.reading(keys, batch_size, options))
        source.warn_of_few_places(source.piece_mib)
        return BatchReader([source], state)

    def _source(self, reading: Reading, order: ReadingOrder | None = None) -> BatchSource:
        return BatchSource(self._objects, self.blocks, reading, self.metadata.fingerprint(), order)

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
        arrays = [self._key(key).name for key in as_keys(keys)]
        options = BatchOptions(
            shuffle=True, seed=seed, token_filter=token_filter, dtype=STORED, buffer_mib=SAMPLE_BUFFER_MIB
        )
        batches = BatchReader([self._source(self._readable.reading(arrays, 4096, options))])
        with closing(batches):
            return sample_statistics(batches, integer("num_tokens", num_tokens, 1))

    def _key(self, layer: object, site: object = None) -> ActivationKey:
        return self._readable.key(layer if site is None else (layer, site))

    @cached_property
    def _readable(self) -> Readable:
        hooks = {key.name: key.hook_name() for key in self.keys}
        for name in hooks:
            attributes = self.arrays[name].spec().to_json()["metadata"].get("attributes", {})
            hooks[name] = str(attributes.get("hook_name", hooks[name]))
        return Readable(f"the store {self.path}", self._layout, self._feature_widths, StoreError, hooks)


@dataclass(frozen=True)
class StoredArray:
    """An array of activations in a store. Indexing reads its rows, as `ActivationStore.read` does."""

    store: ActivationStore
    key: ActivationKey

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, S, D]. Only the rows in `store.rows` are stored."""
        return self.store.arrays[self.key.name].shape

    def __getitem__(self, index: Rows | tuple[Any, ...]) -> np.ndarray:
        rows, *rest = index if isinstance(index, tuple) and index else (index,)
        values = self.store.read(self.key, rows=rows)
        try:
            return values[tuple(rest)] if is_one_row(rows) else values[(slice(None), *rest)]
        except (IndexError, TypeError, ValueError) as error:
            raise ArgumentError(f"the index {shown(index)} does not fit {self.key.name}: {error}.") from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def _read_blocks(storage: Storage, root: StoreRoot) -> tuple[BlockTable, list[CommitRecord]]:
    """All blocks in row order, and the last record of each stream if the store is unfinished."""
    table = read_table(storage, root.blocks_sha256) if root.complete else None
    if table is not None:
        return table, []
    streams = read_streams(storage, range(root.metadata.num_streams))
    return join_streams(streams), [blocks.last for blocks in streams.values() if blocks.last is not None]
