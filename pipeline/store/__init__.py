"""The store: writing, reading and checking activations on disk. Imports neither JAX nor Hydra."""

from pipeline.store.batches import Batch, BatchReader
from pipeline.store.filters import TokenFilter
from pipeline.store.reader import ActivationStore, DocumentActivations, TokenRows
from pipeline.store.sample import ActivationSample, Normalisation

__all__ = [
    "ActivationSample",
    "ActivationStore",
    "Batch",
    "BatchReader",
    "DocumentActivations",
    "Normalisation",
    "TokenFilter",
    "TokenRows",
]
