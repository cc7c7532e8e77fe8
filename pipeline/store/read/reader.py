"""Reading a store: rows, documents, and batches of tokens for training.

    from pipeline.store import ActivationStore

    store = ActivationStore.open("gs://bucket/store")
    for batch in store.batches((5, "resid_post"), batch_size=4096, shuffle=True, seed=0):
        train_step(batch.activations)  # [4096, d]

Works on finished and on unfinished stores; of the latter it sees the blocks that were committed when it was opened.
Shapes: T positions of a row, S slots of a row for activations (its positions, or fewer where only some tokens'
activations are stored: `capture.positions`), D features of an activation.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsIndex

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorstore as ts
from jaxtyping import Int32, Int64
from numpy.typing import DTypeLike

from pipeline.core.addresses import HUB_SCHEME
from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.core.sites import ActivationKey, Site
from pipeline.store.features.firings import FeatureIndexes, FeatureStatistics, Firings
from pipeline.store.format.arrays import open_existing, require_layout
from pipeline.store.format.block_table import BlockTable, join_streams, read_streams, read_table
from pipeline.store.format.commits import CommitRecord, read_consolidated
from pipeline.store.format.keys import features_name
from pipeline.store.format.layout import DOCUMENTS, POSITIONS, SEGMENTS, SELECTED, SIDE_ARRAYS, TOKENS
from pipeline.store.format.metadata import StoreMetadata, StoreRoot, require_root
from pipeline.store.format.normalisation import Normalisation
from pipeline.store.format.statistics import Statistics, merge_streams, read_merged
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.storage import Storage, StorageLike
from pipeline.store.read.batch_options import BatchOptions, Key, Readable, Reading, is_key, with_fields
from pipeline.store.read.batches import BatchReader
from pipeline.store.read.documents import DocumentActivations, StoredDocuments, document_slots
from pipeline.store.read.features import feature_batches
from pipeline.store.read.filters import TokenFilter
from pipeline.store.read.gathering import sample_statistics
from pipeline.store.read.order import ReadingOrder
from pipeline.store.read.rows import slot_side_arrays
from pipeline.store.read.stored_rows import Rows, StoredRows, is_one_row

# MiB of activations that a sample's tokens are drawn from.
SAMPLE_BUFFER_MIB = 64.0

# Requests to a remote store that a reader has under way: side arrays of many blocks, while activations are read.
REMOTE_REQUESTS = 128


@dataclass(frozen=True)
class TokenRows:
    """The side arrays of some rows: [n, S], or [S] for one row.

    segments: 0 where there is no token, k in the row's k-th document window. positions: from 0 in each window.
    documents: the document's number, -1 where there is no token.
    """

    tokens: Int32[np.ndarray, "*n S"]
    segments: Int32[np.ndarray, "*n S"]
    positions: Int32[np.ndarray, "*n S"]
    documents: Int64[np.ndarray, "*n S"]


class ActivationStore:
    """A store, open for reading. Use `ActivationStore.open`.

    path: as it was given; of the Hub, with the commit.
    metadata: what determines the store's content. complete: whether no block is missing.
    keys: the stored activations; layers, sites: those that are among them.
    length: token positions of a row. slots: slots of a row for activations, `length` unless only some tokens'
    activations are stored.
    blocks: the committed blocks, in the order of their rows.
    weights_error: of a model with int8 weights, the relative error that they cause, by array name.
    cache_error: of data=generate with int8 keys and values, the one that these cause, by array name and of final_norm.
    arrays: the TensorStore arrays by name, as they are stored, for reading them in other ways.
    storage: where the store's objects are.
    """

    def __init__(
        self,
        storage: Storage,
        root: StoreRoot,
        blocks: BlockTable,
        last: Sequence[CommitRecord],
        arrays: Mapping[str, ts.TensorStore],
    ) -> None:
        """last: of an unfinished store, the record of each stream's last block."""
        self.path = storage.path
        self.metadata: StoreMetadata = root.metadata
        self.complete: bool = root.complete
        self.weights_error: Mapping[str, float | None] | None = root.weights_error
        self.cache_error: Mapping[str, float | None] | None = root.cache_error
        self.keys: tuple[ActivationKey, ...] = tuple(ActivationKey.parse(name) for name in root.arrays)
        self.arrays = arrays
        self.storage = storage
        self._statistics_digests = root.statistics_digests
        self._feature_widths = {sae["features"]: sae["width"] for sae in root.metadata.encoders}
        self._layout = require_layout(root, arrays, storage.path)
        self.layers: tuple[int, ...] = tuple(sorted({key.layer for key in self.keys if key.site.per_layer}))
        self.sites: tuple[Site, ...] = tuple(dict.fromkeys(key.site for key in self.keys))
        self.length: int = self._layout.length
        self.slots: int = self._layout.slots
        self.blocks = blocks
        self._last = last
        self._rows = StoredRows(storage, self._layout, arrays, self.blocks)
        self._documents = StoredDocuments(storage, self.blocks, self.metadata.num_streams)

    @classmethod
    def open(cls, place: StorageLike) -> "ActivationStore":
        """Opens the store at a local path, `gs://`, `s3://`, `memory://` or `hf://datasets/owner/name[@revision]`, or
        in a Storage, whose options then hold.

        Raises StoreInvalid where there is no store, or one that is damaged or of another version, and StoreError where
        it cannot be reached.
        """
        storage = Storage.open(place)
        if storage.is_remote and storage is not place:
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
                f"{storage.path} was completed with {sum(root.blocks)} blocks, but {sum(counts)} have a commit record, "
                "or they are of other streams. Run the job again, which computes what is missing, or pipeline.verify, "
                "which names it."
            )
        return cls(storage, root, blocks, last, arrays)

    def __reduce_ex__(self, protocol: int) -> str | tuple[Any, ...]:
        """A store on the Hub is opened again, at its commit, with the default options: each process has a relay."""
        if self.path.startswith(HUB_SCHEME):
            return ActivationStore.open, (self.path,)
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        arrays = ", ".join([*(key.name for key in self.keys), *self._feature_widths]) or "no activations"
        extent = f"{self.num_tokens:,} tokens in {len(self.blocks)} blocks{'' if self.complete else ', unfinished'}"
        return f"ActivationStore({self.path!r}: {arrays}; {extent})"

    @cached_property
    def num_tokens(self) -> int:
        """Stored tokens, without padding."""
        return self.blocks.total("tokens")

    @cached_property
    def num_activations(self) -> int:
        """Stored tokens whose activations are stored: all of them, unless `capture.positions` selects some."""
        return self.blocks.total("activations")

    @property
    def rows(self) -> Int64[np.ndarray, " n"]:
        """The numbers of the rows that are in the store, ascending: an array's other rows are padding."""
        return self._rows.numbers

    @property
    def documents(self) -> pa.Table:
        """Every document of every block: one table row per document and block that it has tokens in.

        The columns are those of `_documents` (document, id, source, index, n_tokens, n_cut, first_token, last_token and
        the source's own) with the stream and block in front.
        """
        return self._documents.table

    def statistics(self, layer: SupportsIndex | None, site: Site | str) -> Statistics:
        """Mean and variance of each feature, and the norms, over every stored token of an array.

        Raises StoreError for a store that was made with capture.statistics=false.
        """
        return self._merged_statistics(self._key((layer, site)).name)

    def _merged_statistics(self, name: str) -> Statistics:
        digests = self._statistics_digests
        is_named = digests is None or name in digests  # else what is there is of another extent
        if self.complete:
            statistics = read_merged(self.storage, name, (digests or {}).get(name)) if is_named else None
            if statistics is None and len(self.blocks) and self.blocks.has_statistics.all() and is_named:
                raise StoreInvalid(
                    f"{self.path} is complete, but its statistics of {name} are missing. {DAMAGE_REMEDY}"
                )
        else:
            statistics = merge_streams(self.storage, self._last).get(name)
        if statistics is None:
            earlier = ", or by an earlier program" if name in self._feature_widths else ""
            raise StoreError(
                f"{self.path} has no statistics of {name}: it was made with capture.statistics=false{earlier}."
            )
        return statistics

    def feature_statistics(self, name: str) -> FeatureStatistics:
        """How often each feature of an SAE fires, and how strongly, over every token whose features are stored; with
        capture.encode_error also how well the SAE reconstructs them.

        `name`: of the array that the SAE encodes, e.g. "blocks.5.resid_post", with ".<its name>" where several encode
        it. Raises StoreError where there is no such SAE, and for a store without statistics of features.
        """
        features = self._features_name(name)
        array = self.metadata.reconstructed.get(features)
        statistics = self._merged_statistics(features)
        return FeatureStatistics.of(statistics, None if array is None else self._merged_statistics(array))

    def feature(self, name: str, feature: SupportsIndex, top: int | None = None) -> Firings:
        """Where one feature of an SAE fires, in the order of the store, or the `top` strongest of its firings.

        `name`: as in `feature_statistics`. Two small reads of each block; with `top` one of each, and another of at
        most `top` blocks. Raises StoreError where there is no such SAE or feature, and for a store without an index by
        feature.
        """
        features = self._features_name(name)
        width, feature = self._feature_widths[features], operator.index(feature)
        if not 0 <= feature < width:
            raise StoreError(f"feature {feature} of {name}: the SAE has the features 0 to {width - 1}.")
        if top is not None and top < 1:
            raise ValueError(f"top is {top}. Ask for at least one firing, or for all with top=None.")
        if features not in self.metadata.indexed_features:
            raise StoreError(
                f"the store {self.path} has no index by feature: it was made with capture.encode_index=false, or by an "
                "earlier program. Read all features with batches(..., features=True)."
            )
        value_type = self.arrays[f"{features}.value"].dtype.numpy_dtype
        indexes = FeatureIndexes(
            self.storage, features, width, value_type, self.slots, self.blocks, self._layout.first_row
        )
        return self.storage.retry_read(lambda: indexes.read(feature, top))

    def _features_name(self, name: str) -> str:
        """What the names of an SAE's arrays begin with."""
        features = features_name(name)
        if features not in self._feature_widths:
            stored = ", ".join(stored.removeprefix("features.") for stored in self._feature_widths) or "none"
            raise StoreError(f"the store {self.path} has no features of {name!r}; it has those of: {stored}.")
        return features

    def normalisation(self, keys: Key | Sequence[Key], per_feature: bool = False) -> dict[str, Normalisation]:
        """By array name, the normalisation to zero mean and unit variance, from the stored statistics.

        See `Statistics.normalisation`. Raises StoreError for a store that was made with capture.statistics=false:
        `sample` finds statistics there.
        """
        parsed = (self._key(key) for key in ([keys] if is_key(keys) else keys))
        return {key.name: self.statistics(key.layer, key.site).normalisation(per_feature) for key in parsed}

    def read(self, layer: SupportsIndex | None, site: Site | str, rows: Rows, dtype: DTypeLike = None) -> np.ndarray:
        """Activations [n, S, D] of some rows ([S, D] for one), zeros where there is no token.

        `layer` is None for the sites that exist once. `rows` are row numbers, as in `store.rows`, or a mask of these; a
        slice selects the stored ones of its range. `dtype` is the store's (of int8: float32, dequantised) unless given.
        Raises StoreError for a row that is not stored, or damaged.
        """
        [(_, values)] = self._rows.activations([self._key((layer, site)).name], self._rows.chosen(rows))
        values = values if dtype is None else values.astype(dtype, copy=False)
        return values[0] if is_one_row(rows) else values

    def read_tokens(self, rows: Rows, whole: bool = False) -> TokenRows:
        """Tokens, segments, positions and documents of some rows, chosen as in `read`, slot by slot as activations are.

        `whole`: of all positions, S = T, also where only some tokens' activations are stored.
        """
        wanted = self._rows.chosen(rows)
        selects = not whole and self._layout.selected is not None
        names = [*(spec.name for spec in SIDE_ARRAYS), *([SELECTED.name] if selects else [])]
        sides = slot_side_arrays(dict(self._rows.reads(names, wanted)))
        return TokenRows(**{name: values[0] if is_one_row(rows) else values for name, values in sides.items()})

    def read_selected(self, rows: Rows) -> Int32[np.ndarray, "*n S"]:
        """Where in their row the tokens stand whose activations `read` gives; -1 where there is none."""
        wanted = self._rows.chosen(rows)
        if self._layout.selected is not None:
            selected = self._rows.read(SELECTED.name, wanted)
        else:
            segments = self._rows.read(SEGMENTS.name, wanted)
            selected = np.where(segments > 0, np.arange(self.length, dtype=np.int32), np.int32(-1))
        return selected[0] if is_one_row(rows) else selected

    def read_outputs(self, rows: Rows, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """What the model's head says of the tokens of some rows, chosen as in `read`, and the features that SAEs gave
        them, by array name; {} for a store without `capture.outputs` and `capture.encode`. names: the arrays to read;
        None for all.

        [n, S], or [n, S, k] of the k likeliest next tokens, or of k features ([S], [S, k] for one row). Where there is
        no token: 0, and as a feature's index -1.
        """
        wanted = self._rows.chosen(rows)
        chosen = [spec.name for spec in self._layout.outputs if names is None or spec.name in names]
        outputs = self._rows.reads(chosen, wanted)
        return {name: values[0] if is_one_row(rows) else values for name, values in outputs}

    def document(self, id: str | SupportsIndex, keys: Sequence[Key] | None = None) -> DocumentActivations:
        """One document, by its id (str) or number (int), with the activations of `keys` (default: all).

        A document that is longer than a row has several windows, each computed by itself; they follow one another.
        Raises StoreError for an id that no document has, or several have.
        """
        names = [key.name for key in (self.keys if keys is None else map(self._key, keys))]
        documents = self._documents
        by_id = documents.with_id(id) if isinstance(id, str) else None
        number = operator.index(id) if by_id is None else by_id["document"][0].as_py()
        blocks = documents.blocks_of(number)
        selects = self._layout.selected is not None
        sides = [TOKENS.name, POSITIONS.name, DOCUMENTS.name, *([SELECTED.name] if selects else [])]
        side_reads = self._rows.reads(sides, self._rows.of_blocks(blocks))  # under way while the table is read
        entries = documents.with_number(number, blocks) if by_id is None else by_id
        expected = pc.sum(pc.subtract(entries["last_token"], entries["first_token"])).as_py()
        slots = document_slots(number, self._rows.of_blocks(blocks), dict(side_reads))
        if len(slots.text) != expected:
            raise StoreError(f"{len(slots.text)} tokens of document {number} are in {self.path}, expected {expected}.")
        output_reads = self._rows.reads([spec.name for spec in self._layout.outputs], slots.rows)
        activations = {name: values[slots.in_document] for name, values in self._rows.activations(names, slots.rows)}
        outputs = {name: values[slots.in_document] for name, values in output_reads}
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

    def batches(
        self,
        keys: Key | Sequence[Key],
        batch_size: int,
        options: BatchOptions = BatchOptions(),  # noqa: B008  frozen
        *,
        state: Mapping[str, int] | None = None,
        **fields: Any,
    ) -> BatchReader:
        """Every stored activation exactly once per epoch, `batch_size` tokens at a time, never padding.

        keys: one activation, e.g. (5, "resid_post"), or a list of them, aligned: see `Batch`; with `features=True` the
        list may be empty. options, fields: see `BatchOptions`; its fields can be given by name, as in `shuffle=True,
        seed=1`. state: `BatchReader.state()` of an equal reader, or at the beginning or end of an epoch of one with
        another rank and world, to go on from there. Logs a warning where shuffling mixes the tokens of few places in
        the store.

        Raises StoreError for a damaged block, for outputs or features that the store lacks and when nothing is to be
        read, ValueError for options that contradict each other or the state, TypeError for a field that `BatchOptions`
        lacks, and ImportError when the framework is not installed.
        """
        reader = self._reader(self._reading(keys, batch_size, with_fields(options, fields)), state)
        reader.warn_of_few_places()
        return reader

    def _reading(self, keys: Key | Sequence[Key], batch_size: int, options: BatchOptions) -> Reading:
        """The arrays that `keys` name, and how to read them. Raises StoreError, and ValueError."""
        return self._readable.reading(keys, batch_size, options)

    def _reader(
        self, reading: Reading, state: Mapping[str, int] | None = None, order: ReadingOrder | None = None
    ) -> BatchReader:
        return BatchReader(self.storage, self._layout, self.arrays, self.blocks, reading, state, order)

    def sample(
        self,
        keys: Key | Sequence[Key],
        num_tokens: int = 65536,
        seed: int = 0,
        token_filter: TokenFilter = TokenFilter(),  # noqa: B008  frozen
    ) -> dict[str, Statistics]:
        """Statistics of some activations, by array name, from the first `num_tokens` shuffled tokens.

        The same arguments give the same sample. Raises ValueError where the filter leaves no token.
        """
        keys = [keys] if is_key(keys) else keys
        names = [self._key(key).name for key in keys]
        options = BatchOptions(shuffle=True, seed=seed, token_filter=token_filter, buffer_mib=SAMPLE_BUFFER_MIB)
        batches = self._reader(self._reading(names, 4096, options))
        with closing(batches):
            return sample_statistics(batches, num_tokens)

    def _key(self, key: Key) -> ActivationKey:
        return self._readable.key(key)

    @cached_property
    def _readable(self) -> Readable:
        return Readable(f"the store {self.path}", self._layout, self._feature_widths, StoreError)


def _read_blocks(storage: Storage, root: StoreRoot) -> tuple[BlockTable, list[CommitRecord]]:
    """All blocks, in the order of their rows; and of an unfinished store the last record of each stream that has one.

    An earlier program's complete store has its records in one object."""
    table = read_table(storage, root.blocks_sha256) if root.complete else None
    if table is not None:
        return table, []
    consolidated = read_consolidated(storage, root.commits_sha256) if root.complete else None
    if consolidated is not None:
        records = [record for stream in consolidated.values() for record in stream]
        return BlockTable.from_records(records).in_row_order(root.metadata.num_streams), []
    streams = read_streams(storage, range(root.metadata.num_streams))
    return join_streams(streams), [blocks.last for blocks in streams.values() if blocks.last is not None]
