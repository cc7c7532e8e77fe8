"""The store: writing, reading and checking activations on disk. Imports neither JAX nor Hydra."""

from pipeline.store.batches import Batch, BatchReader
from pipeline.store.filters import TokenFilter
from pipeline.store.normalisation import Normalisation
from pipeline.store.reader import ActivationStore, DocumentActivations, TokenRows
from pipeline.store.statistics import Statistics

__all__ = [
    "ActivationStore",
    "Batch",
    "BatchReader",
    "DocumentActivations",
    "Normalisation",
    "Statistics",
    "TokenFilter",
    "TokenRows",
]
