"""Reads several stores with the same tokens together, e.g. of two models, or of two sites of one model.

    from pipeline.store import open_aligned

    aligned = open_aligned(["store-a", "store-b"])
    for batch in aligned.batches(["blocks.6.resid_post", "blocks.12.resid_post"], 4096, shuffle=True, seed=0):
        ours, theirs = batch.activations    # [4096, d] from each store, for the same tokens

The stores must be made with the same data, tokenizer and `batch` settings, and the same number of rows per block: set
`store.rows_per_block`, whose default depends on the widest array. n: tokens per batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from pipeline.core.arguments import shown
from pipeline.core.errors import ArgumentError, StoreInvalid, StoreMismatch
from pipeline.store.format.commits import read_commit_records
from pipeline.store.format.normalisation import Normalisation
from pipeline.store.io.storage import StorageLike
from pipeline.store.read.batch_options import BatchOptions
from pipeline.store.read.batches import BatchReader
from pipeline.store.read.gathering import Batch, Position
from pipeline.store.read.reader import ActivationStore, HasBatches, Key

_GEOMETRY = ("num_streams", "rows_per_block", "length", "selected")
_COUNTS = ("stream", "block", "rows", "tokens", "activations")


class AlignedReader(BatchReader):
    """Iterates over batches of several stores, as `BatchReader` does over those of one. `activations`, `outputs` and
    `features` of a batch are tuples with one entry per store."""

    def _start(self) -> Iterator[tuple[Batch, Position]]:
        return _aligned([source.read(self._position, self._end) for source in self._sources])


def _aligned(readers: Sequence[Iterator[tuple[Batch, Position]]]) -> Iterator[tuple[Batch, Position]]:
    """Raises StoreInvalid if the stores' tokens differ: a store has changed, or their completions differ."""
    try:
        while True:
            items = [next(reader, None) for reader in readers]
            if not any(items):
                return
            for before, item in pairwise(items):
                if None in (before, item) or not np.array_equal(before[0].documents, item[0].documents):
                    raise StoreInvalid("the stores no longer hold the same tokens. Open them again with open_aligned.")
            parts = ("activations", "outputs", "features")
            tuples = {part: tuple(getattr(batch, part) for batch, _ in items) for part in parts}
            first, after = items[0]
            yield replace(first, **tuples), after
    finally:
        for reader in readers:
            reader.close()


@dataclass(frozen=True)
class AlignedStores(HasBatches):
    """Stores with the same tokens in the same rows. Use `open_aligned`.

    `batches` is like that of an ActivationStore, for the same tokens of all stores: with one order, one filter, and
    buffers that have `buffer_mib` together. Its `keys` are a list with one entry per store, and so is `normalisation`.
    It also raises ArgumentError if these have other lengths, and for a filter by norms, which would leave out different
    tokens in each store.
    """

    stores: tuple[ActivationStore, ...]

    def _batches(
        self,
        keys: Sequence[Key | Sequence[Key]],
        batch_size: int,
        normalisation: Sequence[Mapping[str, Normalisation] | None] | None,
        options: BatchOptions,
        state: Mapping[str, Any] | None,
    ) -> AlignedReader:
        normalisations = [None] * len(self.stores) if normalisation is None else normalisation
        for values, what in ((keys, "keys"), (normalisations, "normalisation")):
            if not isinstance(values, list | tuple) or len(values) != len(self.stores):
                raise ArgumentError(
                    f"{what} is {shown(values)}, expected a list with one entry for each of {len(self.stores)} stores"
                )
        if options.token_filter.norms:
            raise ArgumentError(
                "token_filter has norms, which would drop different tokens from each store. Remove them, and compare "
                "norms in the batches."
            )
        readings = [
            store._readable.reading(key, batch_size, replace(options, normalisation=store_normalisation))
            for store, key, store_normalisation in zip(self.stores, keys, normalisations, strict=True)
        ]
        stores = [(store._reads, reading) for store, reading in zip(self.stores, readings, strict=True)]
        return AlignedReader.of(stores, self.stores[0].blocks, state)


def open_aligned(stores: Sequence[StorageLike | ActivationStore]) -> AlignedStores:
    """Opens two or more stores with the same tokens in the same rows, to be read together.

    Compares the digests in the blocks' records.

    Raises StoreMismatch, naming the first difference, if the stores have different tokens; StoreError if one cannot be
    read; ArgumentError for fewer than two.
    """
    if not isinstance(stores, list | tuple) or len(stores) < 2:
        raise ArgumentError(f"open_aligned takes a list of two or more stores, got {shown(stores)}")
    opened = tuple(store if isinstance(store, ActivationStore) else ActivationStore.open(store) for store in stores)
    for other in opened[1:]:
        _require_same_geometry(opened[0], other)
        try:
            _require_same_blocks(opened[0], other)
            _require_same_tokens(opened[0], other)
        except StoreMismatch as error:
            _require_same_tokenizer(opened[0], other, error)
            raise
    return AlignedStores(opened)


def _require_same_tokenizer(store: ActivationStore, other: ActivationStore, difference: StoreMismatch) -> None:
    """Raises StoreMismatch if different tokenizers explain a difference between the stores. Called only when the tokens
    differ, since different tokenizers may give the same tokens."""
    ours, theirs = store.metadata.tokenizer, other.metadata.tokenizer
    if ours == theirs:
        return
    keys = ", ".join(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
    raise StoreMismatch(
        f"{store.path} has tokens from {_tokenizer_name(store)}, {other.path} from {_tokenizer_name(other)}, and these "
        f"differ in {keys}. Use models with the same tokenizer. If one model accepts the other's tokens, set its "
        f"model.tokenizer, and the same data.special_tokens, prefix and suffix. The first difference: {difference}"
    ) from difference


def _tokenizer_name(store: ActivationStore) -> str:
    model = store.metadata.config.get("model", {})
    return f"the tokenizer {model.get('tokenizer') or model.get('path')}"


def _require_same_geometry(store: ActivationStore, other: ActivationStore) -> None:
    for name in _GEOMETRY:
        ours, theirs = getattr(store._layout, name), getattr(other._layout, name)
        if ours != theirs:
            raise StoreMismatch(
                f"{name} is {ours} in {store.path} and {theirs} in {other.path}, so their rows have different tokens. "
                "Make both with the same data, tokenizer, batch, capture.positions and store.rows_per_block."
            )


def _require_same_blocks(store: ActivationStore, other: ActivationStore) -> None:
    for ours, theirs in zip(store.blocks, other.blocks, strict=False):
        if different := [name for name in _COUNTS if getattr(ours, name) != getattr(theirs, name)]:
            raise StoreMismatch(
                f"block {ours.block} of stream {ours.stream}: {different[0]} is {getattr(ours, different[0])} in "
                f"{store.path} and {getattr(theirs, different[0])} in {other.path}. Make both with the same data and "
                "run.max_tokens, and wait until both jobs have finished."
            )
    longer, shorter = (store, other) if len(store.blocks) > len(other.blocks) else (other, store)
    if len(longer.blocks) > len(shorter.blocks):
        block = longer.blocks[len(shorter.blocks)]
        raise StoreMismatch(
            f"block {block.block} of stream {block.stream} is in {longer.path}, but not in {shorter.path}. Make both "
            "with the same run.max_tokens, and wait until both jobs have finished."
        )


def _require_same_tokens(store: ActivationStore, other: ActivationStore) -> None:
    """Compares the digests in the records: those of the same values are equal. Raises StoreMismatch."""
    blocks = [(block.stream, block.block) for block in store.blocks]
    names = [spec.name for spec in store._layout.side_arrays]
    records = (read_commit_records(each.storage, blocks) for each in (store, other))
    for (stream, block), ours, theirs in zip(blocks, *records, strict=True):
        if different := [name for name in names if ours.digests.get(name) != theirs.digests.get(name)]:
            raise StoreMismatch(
                f"block {block} of stream {stream}: {different[0]} differs between {store.path} and {other.path}. Make "
                "both from the same data, with the same tokenizer."
            )
