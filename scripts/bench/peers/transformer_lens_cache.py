"""TransformerLens: run_with_cache with stop_at_layer, and unprocessed weights.

HookedTransformer, which is deprecated, is 1.5 times as fast here as TransformerBridge, its successor. It opens models
only by their names on the Hub, and uses a directory with that name if there is one.
"""

import contextlib

import torch
from transformer_lens import HookedTransformer
from transformers import AutoTokenizer

from scripts.bench.peers.torch_batches import TorchExtractor
from scripts.bench.peers.workload import MODELS, Workload


class Extractor(TorchExtractor):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, AutoTokenizer.from_pretrained(workload.checkpoint))
        with contextlib.chdir(MODELS):
            self._model = HookedTransformer.from_pretrained_no_processing(
                workload.model, tokenizer=self._tokenizer, dtype=torch.float32, device="cpu"
            )
        self._hooks = {layer: f"blocks.{layer}.hook_resid_post" for layer in workload.layers}

    def activations(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[int, torch.Tensor]:
        _, cache = self._model.run_with_cache(
            ids,
            attention_mask=mask,
            padding_side="right",
            stop_at_layer=max(self._hooks) + 1,
            names_filter=set(self._hooks.values()).__contains__,
        )
        return {layer: cache[name] for layer, name in self._hooks.items()}
