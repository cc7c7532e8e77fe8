"""This project: the job itself, text to a durable store. Runs in this project's own environment."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline.cluster import devices
from pipeline.config import composing
from pipeline.job.loaded_step import load_step
from pipeline.job.opening import open_job
from pipeline.store import ActivationStore
from scripts.bench.bench_job import fill_store
from scripts.bench.peers.workload import Workload


class Extractor:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        devices.skip_absent_tpu()  # as the command does
        overrides = [f"data.path={workload.directory}", f"store.path={workload.directory}/unused"]
        overrides += [f"model.path={workload.checkpoint}", "model.dtype=float32", "capture.dtype=float32"]
        overrides += [f"batch.rows={workload.batch_rows}", f"batch.length={workload.length}", "run.progress=false"]
        self._job = open_job(composing.compose(["data=fineweb", *overrides, f"capture.layers={list(workload.layers)}"]))
        self._step = load_step(self._job)

    def run(self, out: Path) -> int:
        return fill_store(self._job, self._step, str(out)).tokens

    def stored(self, out: Path) -> Iterator[np.ndarray]:
        store = ActivationStore.open(str(out))
        documents = store.read_tokens(store.rows).documents.ravel()
        order = np.argsort(documents, kind="stable")  # rows have each document's tokens in order
        order = order[documents[order] >= 0]
        for layer in self._workload.layers:
            values = store.read(f"blocks.{layer}.resid_post", store.rows)
            yield values.reshape(-1, values.shape[-1])[order]
