"""Reads several stores with the same tokens together, e.g. of two models, or of two sites of one model.

    from pipeline.store import open_aligned

    aligned = open_aligned(["store-a", "store-b"])
    for batch in aligned.batches(["blocks.6.resid_post", "blocks.12.resid_post"], 4096, shuffle=True, seed=0):
        ours, theirs = batch.activations    # [4096, d] from each store, for the same tokens

The stores must be made with the same data, tokenizer and `batch` settings, and the same number of rows per block: set
`store.rows_per_block`, whose default depends on the widest array. n: tokens per batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.core.errors import ArgumentError, StoreMismatch
from pipeline.core.messages import shown
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.commits import read_commit_records
from pipeline.store.format.layout import LABELS_ARRAY
from pipeline.store.format.statistics import Normalisation
from pipeline.store.io.storage import StorageLike
from pipeline.store.read.batches import HasBatches
from pipeline.store.read.buffers import Stores
from pipeline.store.read.options import BatchOptions, Key
from pipeline.store.read.reader import ActivationStore


@dataclass(frozen=True)
class AlignedStores(HasBatches):
    """Stores with the same tokens in the same rows. Use `open_aligned`.

    `batches` is like that of an ActivationStore, for the same tokens of all stores: with one order, one filter, and
    buffers that have `buffer_mib` together. Its `keys` are a list with one entry per store, and so is `normalisation`.
    It also raises ArgumentError if these have other lengths, and for a filter by norms, which would leave out different
    tokens in each store.
    """

    stores: tuple[ActivationStore, ...]

    def _stored(
        self,
        keys: Sequence[Key | Sequence[Key]],
        options: BatchOptions,
        normalisation: Sequence[Mapping[str, Normalisation] | None] | None,
    ) -> tuple[Stores, BlockTable]:
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
        entries = zip(self.stores, keys, normalisations, strict=True)
        stored = [store._stored(entry, options, normalisation) for store, entry, normalisation in entries]
        return [store for stores, _ in stored for store in stores], self.stores[0].blocks


def open_aligned(stores: Sequence[StorageLike | ActivationStore]) -> AlignedStores:
    """Opens two or more stores with the same tokens in the same rows, to be read together.

    Compares the digests in the blocks' records: those of the same values are equal.

    Raises StoreMismatch, naming the first difference, if the stores have different tokens; StoreError if one cannot be
    read; ArgumentError for fewer than two.
    """
    if not isinstance(stores, list | tuple) or len(stores) < 2:
        raise ArgumentError(f"open_aligned takes a list of two or more stores, got {shown(stores)}")
    opened = tuple(store if isinstance(store, ActivationStore) else ActivationStore.open(store) for store in stores)
    for other in opened[1:]:
        if difference := _difference(opened[0], other):
            raise StoreMismatch(
                f"{difference} differs between {opened[0].path} and {other.path}. Make both from the same data, with "
                "the same tokenizer, batch, capture.positions, run.max_tokens and store.rows_per_block, and wait until "
                "both jobs have finished."
            )
    return AlignedStores(opened)


def _difference(store: ActivationStore, other: ActivationStore) -> str | None:
    """What tells the tokens of two stores apart; None if nothing does."""
    for name in ("num_streams", "rows_per_block", "length", "selected"):
        if getattr(store._layout, name) != getattr(other._layout, name):
            return name
    ours, theirs = (dict.fromkeys((block.stream, block.block) for block in each.blocks) for each in (store, other))
    for stream, block in ours.keys() ^ theirs.keys():
        return f"whether there is a block {block} of stream {stream}"
    names = [spec.name for spec in store._layout.side_arrays if spec is not LABELS_ARRAY]
    records = (read_commit_records(each.storage, list(ours)) for each in (store, other))
    for (stream, block), *pair in zip(ours, *records, strict=True):
        for name in names:
            if pair[0].digests.get(name) != pair[1].digests.get(name):
                return f"{name} of block {block} of stream {stream}"
    return None
