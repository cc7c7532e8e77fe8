"""The store: writing, reading and checking activations on disk. Imports neither JAX nor Hydra."""

from pipeline.store.format.normalisation import Normalisation
from pipeline.store.format.statistics import Statistics
from pipeline.store.read.batches import Batch, BatchReader
from pipeline.store.read.filters import TokenFilter
from pipeline.store.read.reader import ActivationStore, DocumentActivations, TokenRows

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
