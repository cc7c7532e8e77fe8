"""Writes a run's metrics into the store while the writer thread continues."""

import logging

import tensorstore as ts

from pipeline.core.errors import StoreError
from pipeline.job.metrics import Metrics, Stage
from pipeline.store.write.store_writer import StoreWriter, metrics_key

log = logging.getLogger("pipeline")


class MetricsWrites:
    """Writes the metrics, one write at a time. If a write fails, logs a warning: the run continues without it."""

    def __init__(self, store: StoreWriter, metrics: Metrics) -> None:
        self._storage = store.storage
        self._key = metrics_key(metrics.name)
        self._metrics = metrics
        self._under_way: ts.Future | None = None

    def start_if_due(self) -> None:
        """Starts a write if the last one is done and the interval has passed. Does not wait for the storage."""
        if (self._under_way is None or self._under_way.done()) and self._metrics.is_due():
            self._finish()
            self._start()

    def close(self) -> None:
        """Writes the current metrics, and waits until the write is done."""
        self._finish()
        self._start()
        self._finish()

    def _start(self) -> None:
        with self._metrics.stage(Stage.WRITER_METRICS):
            try:
                self._under_way = self._storage.start_write(self._key, self._metrics.emit())
            except StoreError as error:
                self._warn(error)

    def _finish(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        with self._metrics.stage(Stage.WRITER_METRICS):
            try:
                with self._storage.errors(self._key):
                    under_way.result()
            except StoreError as error:
                self._warn(error)

    def _warn(self, error: StoreError) -> None:
        log.warning("cannot write the run's metrics: %s", error)
