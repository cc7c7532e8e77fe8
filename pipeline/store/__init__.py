"""The store: writing, reading and checking activations on disk. Imports neither JAX nor Hydra."""

from pipeline.store.batches import Batch
from pipeline.store.reader import ActivationStore, DocumentActivations, TokenRows

__all__ = ["ActivationStore", "Batch", "DocumentActivations", "TokenRows"]
