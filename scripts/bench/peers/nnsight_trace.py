"""nnsight: a trace that saves the layers' outputs and stops after the last."""

import nnsight
import torch

from scripts.bench.peers.torch_batches import TorchExtractor
from scripts.bench.peers.workload import Workload


class Extractor(TorchExtractor):
    def __init__(self, workload: Workload) -> None:
        path = str(workload.checkpoint)
        self._model = nnsight.TransformersModel(path, task="text-generation", dtype=torch.float32, dispatch=True)
        self._blocks = self._model.transformer.h if "gpt2" in workload.model else self._model.model.layers
        super().__init__(workload, self._model.tokenizer)

    def activations(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[int, torch.Tensor]:
        layers, envoys = self._workload.layers, self._blocks
        with self._model.trace({"input_ids": ids, "attention_mask": mask}, use_cache=False) as tracer:
            kept = nnsight.save({})
            for layer in layers:
                kept[layer] = envoys[layer].output
            tracer.stop()
        return {layer: value[0] if isinstance(value, tuple) else value for layer, value in kept.items()}
