"""Writes the contexts that SAELens's ActivationsStore makes of texts, for test_contexts_of_saelens.

    python -m tests.data.saelens_contexts FOLDER TOKENIZER PARQUET...

Each case is a file {prepend_bos}-{separator}.npy: [contexts, context_size].
"""

import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
from datasets import load_dataset
from sae_lens.training.activations_store import ActivationsStore
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import AutoTokenizer

CONTEXT = 128


def main(folder: str, tokenizer_path: str, *files: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    config = HookedTransformerConfig(
        n_layers=1, d_model=4, n_ctx=CONTEXT, d_head=4, d_vocab=len(tokenizer), act_fn="relu", device="cpu"
    )
    model = HookedTransformer(config, tokenizer=tokenizer)
    for prepend_bos, separator in product((True, False), ("bos", "eos", None)):
        store = ActivationsStore(
            model,
            load_dataset("parquet", data_files=list(files), split="train", streaming=True),
            streaming=True,
            hook_name="blocks.0.hook_resid_post",
            hook_head_index=None,
            context_size=CONTEXT,
            d_in=4,
            n_batches_in_buffer=1,
            total_training_tokens=1,
            store_batch_size_prompts=1,
            train_batch_size_tokens=1,
            prepend_bos=prepend_bos,
            normalize_activations="none",
            device="cpu",
            dtype="float32",
            sequence_separator_token=separator,
        )
        contexts = []
        with suppress(StopIteration):
            while True:
                contexts.append(store.get_batch_tokens(1, raise_at_epoch_end=True).numpy())
        np.save(Path(folder, f"{prepend_bos}-{separator}.npy"), np.concatenate(contexts))


main(*sys.argv[1:])
