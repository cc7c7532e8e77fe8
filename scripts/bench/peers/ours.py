"""This project: the job itself, text to a durable store. Runs in this project's own environment."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from workload import Workload

from pipeline.cluster import devices, preemption
from pipeline.config import composing
from pipeline.job.loaded_step import load_step
from pipeline.job.loop import fill
from pipeline.job.opening import open_job
from pipeline.store import ActivationStore
from pipeline.store.write.store_writer import StoreWriter


class Extractor:
    isolates = True

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        devices.skip_absent_tpu()  # as the command does
        self._job = open_job(
            composing.compose(
                [
                    "data=fineweb",
                    f"data.path={workload.directory}",
                    f"model.path={workload.checkpoint}",
                    "model.dtype=float32",
                    f"capture.layers={list(workload.layers)}",
                    "capture.dtype=float32",
                    f"batch.rows={workload.batch_rows}",
                    f"batch.length={workload.length}",
                    "run.progress=false",
                    f"store.path={workload.directory}/unused",
                ]
            )
        )
        self._step = load_step(self._job)

    def run(self, out: Path) -> int:
        shutil.rmtree(out)
        store = StoreWriter.open(str(out), self._job.metadata, self._job.layout)
        with preemption.stop_on_signals() as stop:
            metrics = fill(self._job, store, stop, self._step)
        store.finish()
        return metrics.tokens

    def stored(self, out: Path) -> Iterator[np.ndarray]:
        store = ActivationStore.open(str(out))
        documents = store.read_tokens(store.rows).documents.ravel()
        order = np.argsort(documents, kind="stable")  # rows have each document's tokens in order
        order = order[documents[order] >= 0]
        for layer in self._workload.layers:
            values = store.read(f"blocks.{layer}.resid_post", store.rows)
            yield values.reshape(-1, values.shape[-1])[order]
