"""Functions shared by the torch scripts: text to batches, and a safetensors file of each batch's activations."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase
from workload import Workload


def batches(
    tokenizer: PreTrainedTokenizerBase, workload: Workload, by_length: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and mask [rows, longest]: windows of documents, padded to the longest of the batch."""
    texts = pq.read_table(workload.directory, columns=["text"])["text"].to_pylist()
    windows = [
        ids[first : first + workload.length]
        for ids in tokenizer(texts)["input_ids"]
        for first in range(0, len(ids), workload.length)
    ]
    if by_length:
        windows.sort(key=len)
    for first in range(0, len(windows), workload.batch_rows):
        batch = tokenizer.pad({"input_ids": windows[first : first + workload.batch_rows]}, return_tensors="pt")
        yield batch["input_ids"], batch["attention_mask"]


def save(out: Path, number: int, activations: Mapping[int, torch.Tensor], ids: torch.Tensor, mask: torch.Tensor) -> int:
    """Writes the valid tokens of a batch, {layer: [rows, T, d]} and their ids. Returns their number."""
    if mask.all():
        kept = {f"layer.{layer}": values.flatten(0, 1) for layer, values in activations.items()}
    else:
        kept = {f"layer.{layer}": values[mask.bool()] for layer, values in activations.items()}
    valid = ids[mask.bool()]
    save_file(kept | {"tokens": valid}, out / f"{number:05d}.safetensors")
    return len(valid)


def saved(out: Path, workload: Workload) -> Iterator[np.ndarray]:
    """The activations that `save` has written, one layer at a time."""
    files = sorted(out.glob("*.safetensors"))
    for layer in workload.layers:
        yield np.concatenate([load_file(file)[f"layer.{layer}"] for file in files])


def blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The layers of a transformers model without a head."""
    return model.h if hasattr(model, "h") else model.layers
