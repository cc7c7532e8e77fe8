"""TransformerLens: run_with_cache with stop_at_layer, and unprocessed weights.

HookedTransformer, which is deprecated, is 1.5 times as fast here as TransformerBridge, its successor. It opens models
only by their names on the Hub, and uses a directory with that name if there is one.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch_batches import batches, save, saved
from transformer_lens import HookedTransformer
from transformers import AutoTokenizer
from workload import MODELS, Workload


class Extractor:
    alignment = "token ids"
    isolates = True

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._tokenizer = AutoTokenizer.from_pretrained(workload.checkpoint)
        with contextlib.chdir(MODELS):
            self._model = HookedTransformer.from_pretrained_no_processing(
                workload.model, tokenizer=self._tokenizer, dtype=torch.float32, device="cpu"
            )
        self._hooks = {layer: f"blocks.{layer}.hook_resid_post" for layer in workload.layers}

    @torch.inference_mode()
    def run(self, out: Path) -> int:
        num_tokens, names = 0, set(self._hooks.values())
        for number, (ids, mask) in enumerate(batches(self._tokenizer, self._workload)):
            _, cache = self._model.run_with_cache(
                ids,
                attention_mask=mask,
                padding_side="right",
                stop_at_layer=max(self._hooks) + 1,
                names_filter=names.__contains__,
            )
            num_tokens += save(out, number, {layer: cache[name] for layer, name in self._hooks.items()}, ids, mask)
        return num_tokens

    def stored(self, out: Path) -> Iterator[np.ndarray]:
        return saved(out, self._workload)
