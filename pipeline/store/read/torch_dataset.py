"""A store as a PyTorch dataset. The only module that needs torch."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from pipeline.core.addresses import HUB_SCHEME
from pipeline.store.io.storage import Storage
from pipeline.store.read.reader import ActivationStore, Key


class ActivationDataset(IterableDataset):
    """The batches of a store, each a dict of tensors with the fields of `Batch`.

        DataLoader(ActivationDataset(path, (5, "resid_post"), 4096, shuffle=True, epochs=None), batch_size=None)

    `options` are the fields of `BatchOptions`. The reader uses threads, so `num_workers=0` is fastest. Workers need
    `multiprocessing_context="spawn"` and divide this rank's share among themselves.
    """

    def __init__(self, path: str | os.PathLike[str], keys: Key | Sequence[Key], batch_size: int, **options: Any):
        # On the Hub, the path with the commit, so that every epoch and worker reads the same.
        self._path = Storage.open(path).path if str(path).startswith(HUB_SCHEME) else path
        self._keys = keys
        self._batch_size = batch_size
        self._options = options

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, world = self._options.get("rank", 0), self._options.get("world", 1)
        if worker := get_worker_info():
            rank, world = rank * worker.num_workers + worker.id, world * worker.num_workers
        options = self._options | {"rank": rank, "world": world, "framework": "torch"}
        batches = ActivationStore.open(self._path).batches(self._keys, self._batch_size, **options)
        return (vars(batch) for batch in batches)
