"""Reads activations from a store: local, `gs://`, `s3://`, or `hf://` of the Hub. Imports neither JAX, torch nor Hydra.

    from pipeline.store import ActivationStore, TokenFilter

    store = ActivationStore.open("gs://bucket/store")
    store.read("blocks.2.resid_post", rows=0)                       # [positions, d_model]
    store.document("some-id").activations["blocks.2.resid_post"]    # one document, in order
    for batch in store.batches("blocks.2.resid_post", batch_size=4096, shuffle=True, seed=0):
        batch.activations                                           # [4096, d_model], valid tokens only

`ActivationStore` opens a store, finished or not, and reads rows, documents, single tokens, document tables and
statistics.
`ActivationStore.batches` returns a `BatchReader`, an iterator of `Batch`: shuffled, resumable, divided among readers,
filtered (`TokenFilter`) and normalised (`Normalisation`), as numpy, JAX or torch arrays.
`open_aligned` opens several stores of the same tokens; its batches contain the activations from each of them.

Errors are `pipeline.core.errors.StoreError` (the store cannot be read now) and its subclass `StoreInvalid` (it is
damaged, or not a store). `docs/reading.md` has examples; `docs/store-format.md` describes the format.
"""

from pipeline.store.format.statistics import Normalisation, Statistics
from pipeline.store.read.aligned import AlignedStores, open_aligned
from pipeline.store.read.batches import BatchReader
from pipeline.store.read.frameworks import FeatureBatch
from pipeline.store.read.gathering import Batch
from pipeline.store.read.options import TokenFilter
from pipeline.store.read.reader import ActivationStore, DocumentActivations, TokenRows

__all__ = [
    "ActivationStore",
    "AlignedStores",
    "Batch",
    "BatchReader",
    "DocumentActivations",
    "FeatureBatch",
    "Normalisation",
    "Statistics",
    "TokenFilter",
    "TokenRows",
    "open_aligned",
]
