"""A store as a PyTorch dataset. The only module that needs torch."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from pipeline.core.addresses import HUB_SCHEME
from pipeline.core.arguments import integer
from pipeline.store.io.storage import Storage, StorageLike
from pipeline.store.read.reader import ActivationStore, Key

_LOADERS = 16  # whose workers may start at the same time
_POLL_S = 0.01


class ActivationDataset(IterableDataset):
    """The batches of a store, or of the one at a path, each a dict of tensors with the fields of `Batch`.

        DataLoader(ActivationDataset(store, "blocks.5.resid_post", 4096, shuffle=True), batch_size=None)

    `options` are the arguments of `ActivationStore.batches`. Each iteration is another pass over the store, in another
    order; after `set_epoch(n)` every iteration is pass n. The reader uses threads, so `num_workers=0` is fastest.
    Workers need `multiprocessing_context="spawn"` and divide this rank's share among themselves.
    """

    def __init__(
        self, store: ActivationStore | StorageLike, keys: Key | Sequence[Key], batch_size: int, **options: Any
    ):
        # On the Hub, the path with the commit, so that every epoch and worker reads the same.
        store = Storage.open(store) if str(store).startswith(HUB_SCHEME) else store
        self._path = store.path if isinstance(store, ActivationStore | Storage) else store
        self._keys = keys
        self._batch_size = batch_size
        self._options = options
        # In memory that workers share: the epoch that was set, or -1; the next pass; and by loader, the seed that its
        # workers have in common, and their first pass.
        self._epoch, self._next = (torch.tensor(value).share_memory_() for value in (-1, 0))
        self._loaders = torch.full((_LOADERS, 2), -1, dtype=torch.int64).share_memory_()
        self._first = self._num_passes = 0  # of this worker

    def set_epoch(self, epoch: int) -> None:
        """Chooses the pass of the next iterations, also in workers that persist."""
        self._epoch.fill_(integer("epoch", epoch))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        options = self._options | {"framework": "torch"}
        if worker := get_worker_info():
            options["rank"] = integer("rank", options.get("rank", 0)) * worker.num_workers + worker.id
            options["world"] = integer("world", options.get("world", 1)) * worker.num_workers
        epochs, state = integer("epochs", options.get("epochs", 1) or 1, 1), options.get("state")
        first = integer("the state's epoch", state["epoch"]) // epochs if isinstance(state, dict) and state else 0
        number = first + self._pass() if int(self._epoch) < 0 else int(self._epoch)
        if number != first:
            options["state"] = {"epoch": number * epochs}
        batches = ActivationStore.open(self._path).batches(self._keys, self._batch_size, **options)
        return (vars(batch) for batch in batches)

    def _pass(self) -> int:
        """The number of this iteration. The workers of a loader agree on it, although each starts when it does."""
        worker, number = get_worker_info(), int(self._next)
        if worker is not None:
            if not self._num_passes:
                self._first = self._first_pass(worker.id, worker.seed - worker.id)
            number = self._first + self._num_passes
            self._num_passes += 1
        self._next.fill_(max(number + 1, int(self._next)))
        return number

    def _first_pass(self, worker: int, seed: int) -> int:
        """The first pass of this worker's loader, which its first worker chooses. seed: what its workers share."""
        if worker == 0:
            row = self._loaders[:, 1].argmin()
            self._loaders[row, 1] = self._next
            self._loaders[row, 0] = seed
        while not (rows := self._loaders[self._loaders[:, 0] == seed]).numel():
            time.sleep(_POLL_S)
        return int(rows[0, 1])
