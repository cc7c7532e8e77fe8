"""transformers with forward hooks, the last of which stops the model: the fastest simple script."""

from contextlib import suppress
from functools import partial

import torch
from transformers import AutoModel, AutoTokenizer

from scripts.bench.peers.torch_batches import TorchExtractor
from scripts.bench.peers.workload import Workload


class _Stop(Exception):
    """Raised by the last hook."""


class Extractor(TorchExtractor):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, AutoTokenizer.from_pretrained(workload.checkpoint))
        self._model = AutoModel.from_pretrained(workload.checkpoint, dtype=torch.float32).eval()
        self._kept: dict[int, torch.Tensor] = {}
        blocks = self._model.h if hasattr(self._model, "h") else self._model.layers
        for layer in workload.layers:
            blocks[layer].register_forward_hook(partial(self._keep, layer))

    def _keep(self, layer: int, _module: torch.nn.Module, _inputs: object, output: object) -> None:
        self._kept[layer] = output[0] if isinstance(output, tuple) else output
        if layer == max(self._workload.layers):
            raise _Stop

    def activations(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[int, torch.Tensor]:
        self._kept = {}
        with suppress(_Stop):
            self._model(ids, attention_mask=mask, use_cache=False)
        return self._kept
