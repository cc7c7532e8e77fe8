"""transformers with forward hooks, the last of which stops the model: the fastest simple script."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch_batches import batches, blocks, save, saved
from transformers import AutoModel, AutoTokenizer
from workload import Workload


class _Stop(Exception):
    """Raised by the last hook."""


class Extractor:
    alignment = "token ids"
    isolates = True
    by_length = False

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._tokenizer = AutoTokenizer.from_pretrained(workload.checkpoint)
        self._model = AutoModel.from_pretrained(workload.checkpoint, dtype=torch.float32).eval()
        self._kept: dict[int, torch.Tensor] = {}
        for layer in workload.layers:
            blocks(self._model)[layer].register_forward_hook(partial(self._keep, layer))

    def _keep(self, layer: int, _module: torch.nn.Module, _inputs: object, output: object) -> None:
        self._kept[layer] = output[0] if isinstance(output, tuple) else output
        if layer == max(self._workload.layers):
            raise _Stop

    @torch.inference_mode()
    def run(self, out: Path) -> int:
        num_tokens = 0
        for number, (ids, mask) in enumerate(batches(self._tokenizer, self._workload, self.by_length)):
            try:
                self._model(ids, attention_mask=mask, use_cache=False)
            except _Stop:
                num_tokens += save(out, number, self._kept, ids, mask)
                self._kept.clear()
        return num_tokens

    def stored(self, out: Path) -> Iterator[np.ndarray]:
        return saved(out, self._workload)
