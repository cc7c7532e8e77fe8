"""transformers with output_hidden_states=True. Its last entry is after the final norm, unlike a hook's value."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch_batches import batches, save, saved
from transformers import AutoModel, AutoTokenizer
from workload import Workload


class Extractor:
    alignment = "token ids"
    isolates = True

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._tokenizer = AutoTokenizer.from_pretrained(workload.checkpoint)
        self._model = AutoModel.from_pretrained(workload.checkpoint, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(self, out: Path) -> int:
        num_tokens = 0
        for number, (ids, mask) in enumerate(batches(self._tokenizer, self._workload)):
            output = self._model(ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
            kept = {layer: output.hidden_states[layer + 1] for layer in self._workload.layers}
            num_tokens += save(out, number, kept, ids, mask)
        return num_tokens

    def stored(self, out: Path) -> Iterator[np.ndarray]:
        return saved(out, self._workload)
