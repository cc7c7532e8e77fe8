"""A store as a PyTorch dataset. The only module that needs torch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from pipeline.core.addresses import HUB_SCHEME
from pipeline.core.arguments import integer
from pipeline.core.errors import ArgumentError
from pipeline.store.io.storage import Storage, StorageLike
from pipeline.store.read.reader import ActivationStore, Key


class ActivationDataset(IterableDataset):
    """The batches of a store, each a dict of tensors with the fields of `Batch`.

        DataLoader(ActivationDataset(store, "blocks.5.resid_post", 4096, shuffle=True), batch_size=None)

    An open store's blocks are read, in all passes and workers. The store at a path is opened in every pass and worker:
    give a path only of a finished one. `options` are the arguments of `ActivationStore.batches` except `state`. Each
    iteration is another pass, in another order; after `set_epoch(n)` every iteration is pass n. The reader
    uses threads, so `num_workers=0` is fastest. Workers need `multiprocessing_context="spawn"` and divide this rank's
    share among themselves. Call `set_epoch` before each pass unless they persist: new workers begin with pass 0.
    """

    def __init__(
        self, store: ActivationStore | StorageLike, keys: Key | Sequence[Key], batch_size: int, **options: Any
    ):
        if "state" in options:
            raise ArgumentError("an ActivationDataset has no state: its passes begin with set_epoch. Remove it.")
        # On the Hub, the path with the commit, so that every epoch and worker reads the same.
        store = Storage.open(store) if str(store).startswith(HUB_SCHEME) else store
        self._store = store.path if isinstance(store, Storage) else store
        self._keys = keys
        self._batch_size = batch_size
        self._options = options
        self._epoch = torch.tensor(-1).share_memory_()  # the one that was set, also for workers that persist, or -1
        self._num_passes = 0  # of this process

    def set_epoch(self, epoch: int) -> None:
        """Chooses the pass of the next iterations, also in workers that persist."""
        self._epoch.fill_(integer("epoch", epoch))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        options = self._options | {"framework": "torch"}
        if worker := get_worker_info():
            options["rank"] = integer("rank", options.get("rank", 0)) * worker.num_workers + worker.id
            options["world"] = integer("world", options.get("world", 1)) * worker.num_workers
        number = self._num_passes if int(self._epoch) < 0 else int(self._epoch)
        self._num_passes += 1
        options["state"] = {"epoch": number * (options.get("epochs") or 1)}
        store = self._store if isinstance(self._store, ActivationStore) else ActivationStore.open(self._store)
        return (vars(batch) for batch in store.batches(self._keys, self._batch_size, **options))
