"""nnsight: a trace that saves the layers' outputs and stops after the last."""

from collections.abc import Iterator
from pathlib import Path

import nnsight
import numpy as np
import torch
from torch_batches import batches, save, saved
from workload import Workload


class Extractor:
    alignment = "token ids"
    isolates = True

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._model = nnsight.TransformersModel(
            str(workload.checkpoint), task="text-generation", dtype=torch.float32, dispatch=True
        )
        self._blocks = self._model.transformer.h if "gpt2" in workload.model else self._model.model.layers

    @torch.inference_mode()
    def run(self, out: Path) -> int:
        num_tokens, layers, envoys = 0, self._workload.layers, self._blocks
        for number, (ids, mask) in enumerate(batches(self._model.tokenizer, self._workload)):
            with self._model.trace({"input_ids": ids, "attention_mask": mask}, use_cache=False) as tracer:
                kept = nnsight.save({})
                for layer in layers:
                    kept[layer] = envoys[layer].output
                tracer.stop()
            kept = {layer: value[0] if isinstance(value, tuple) else value for layer, value in kept.items()}
            num_tokens += save(out, number, kept, ids, mask)
        return num_tokens

    def stored(self, out: Path) -> Iterator[np.ndarray]:
        return saved(out, self._workload)
