"""What the torch scripts share: text to batches, and a safetensors file of each batch's activations."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from scripts.bench.peers.workload import Workload


class TorchExtractor:
    """An `Extractor`; subclasses load a model and compute `activations`."""

    def __init__(self, workload: Workload, tokenizer: PreTrainedTokenizerBase) -> None:
        self._workload = workload
        self._tokenizer = tokenizer

    def activations(self, ids: torch.Tensor, mask: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """Each layer's activations [rows, T, d]."""
        raise NotImplementedError

    @torch.inference_mode()
    def run(self, out: Path) -> int:
        num_tokens = 0
        for number, (ids, mask) in enumerate(self._batches()):
            kept = self.activations(ids, mask)
            if mask.all():
                tensors = {f"layer.{layer}": values.flatten(0, 1) for layer, values in kept.items()}
            else:
                tensors = {f"layer.{layer}": values[mask.bool()] for layer, values in kept.items()}
            valid = ids[mask.bool()]
            save_file(tensors | {"tokens": valid}, out / f"{number:05d}.safetensors")
            num_tokens += len(valid)
        return num_tokens

    def stored(self, out: Path) -> Iterator[np.ndarray]:
        files = sorted(out.glob("*.safetensors"))
        for layer in self._workload.layers:
            yield np.concatenate([load_file(file)[f"layer.{layer}"] for file in files])

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Token ids and mask [rows, longest]: windows of documents, padded to the longest of the batch."""
        length, rows = self._workload.length, self._workload.batch_rows
        texts = pq.read_table(self._workload.directory, columns=["text"])["text"].to_pylist()
        windows = [
            ids[first : first + length]
            for ids in self._tokenizer(texts)["input_ids"]
            for first in range(0, len(ids), length)
        ]
        for first in range(0, len(windows), rows):
            batch = self._tokenizer.pad({"input_ids": windows[first : first + rows]}, return_tensors="pt")
            yield batch["input_ids"], batch["attention_mask"]
