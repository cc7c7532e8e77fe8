"""SAELens' CacheActivationsRunner, with its transformers wrapper, which is its fastest. One layer per run.

Documents are joined, and attend to each other.
"""

from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
from sae_lens import CacheActivationsRunner, CacheActivationsRunnerConfig
from sae_lens.cache_activations_runner import _mk_activations_store
from transformers import AutoConfig

from scripts.bench.peers.workload import Workload


class Extractor:
    def __init__(self, workload: Workload) -> None:
        (layer,) = workload.layers
        self._hook = f"transformer.h.{layer}" if "gpt2" in workload.model else f"model.layers.{layer}"
        self._texts = datasets.load_dataset("parquet", data_dir=str(workload.directory), split="train")
        batch_tokens = workload.batch_rows * workload.length
        num_tokens = sum(self._texts["n_tokens"]) // batch_tokens * batch_tokens  # it stores whole batches only
        d_model = AutoConfig.from_pretrained(workload.checkpoint).hidden_size
        config = CacheActivationsRunnerConfig(
            dataset_path=str(workload.directory),
            model_name=str(workload.checkpoint),
            model_class_name="AutoModelForCausalLM",
            model_from_pretrained_kwargs={"dtype": "float32"},
            model_batch_size=workload.batch_rows,
            hook_name=self._hook,
            d_in=d_model,
            training_tokens=num_tokens,
            buffer_size_gb=(num_tokens + 0.5) * d_model * 4 / 1e9,  # one; with its own 2.0 it would repeat the text
            context_size=workload.length,
            new_cached_activations_path=str(workload.directory),  # set for each run
            shuffle=False,
            prepend_bos=False,
            streaming=False,
            device="cpu",
            dtype="float32",
        )
        self._runner = CacheActivationsRunner(config, override_dataset=self._texts)

    def run(self, out: Path) -> int:
        self._runner.cfg.new_cached_activations_path = str(out)
        self._runner.activations_store = _mk_activations_store(self._runner.model, self._runner.cfg, self._texts)
        rows = self._runner.run()
        return rows.num_rows * self._runner.context_size

    def stored(self, out: Path) -> Iterator[np.ndarray]:
        rows = datasets.load_from_disk(str(out)).with_format("numpy")[self._hook]
        yield np.asarray(rows).reshape(-1, self._runner.cfg.d_in)
