"""Exports a store as SAELens' cached activations: the Arrow dataset that its CacheActivationsRunner writes."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from datasets import Array2D, DatasetInfo, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from tqdm import tqdm

from pipeline.core.errors import ConfigError
from pipeline.core.sites import find_array
from pipeline.store import ActivationStore
from pipeline.store.format.layout import MIB
from pipeline.store.read.exports import converted, new_folder, require_context

FILE = "data-00000-of-00001.arrow"
BATCH_MIB = 64  # of activations, written at a time


def write_cached_activations(
    store: ActivationStore, path: Path, names: Sequence[str], context: int, dtype: str
) -> tuple[int, int]:
    """Writes the activation arrays `names` to the folder `path`. Returns the number of contexts, and the number of
    tokens that were left out at the end.

    context: tokens per context. dtype: that of the values.

    Raises ConfigError for unknown names, a store with less than one context, and values that do not fit into `dtype`;
    StoreError; and what `new_folder` raises.
    """
    known = store._root.hook_names
    names = [find_array(name, known) or name for name in names]
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"export.arrays: the store has no {unknown}; it has {[key.name for key in store.keys]}.")
    require_context(store, context)
    hooks = _hook_names(store, names)
    widths = {name: store._root.arrays[name]["width"] for name in names}
    features = Features(
        {hooks[name]: Array2D((context, width), dtype) for name, width in widths.items()}
        | {"token_ids": List(Value("int32"), length=context)}
    )
    context_bytes = context * sum(widths.values()) * np.dtype(dtype).itemsize
    batch_size = context * max(1, BATCH_MIB * MIB // context_bytes)
    num_contexts = num_tokens = 0
    with (
        new_folder(path) as folder,
        ArrowWriter(features=features, path=str(folder / FILE)) as writer,
        tqdm(total=store.num_activations, unit="token", desc="export", file=sys.stderr) as bar,
    ):
        for batch in store.batches(names, batch_size):
            contexts = len(batch.tokens) // context
            kept = contexts * context
            columns = {"token_ids": batch.tokens[:kept].reshape(contexts, context)}
            for name in names:
                values = converted(name, batch.activations[name][:kept], dtype)
                columns[hooks[name]] = values.reshape(contexts, context, values.shape[1])
            if contexts:
                writer.write_batch(columns)
            num_contexts += contexts
            num_tokens += len(batch.tokens)
            bar.update(len(batch.tokens))
        writer.finalize()
        _describe(folder, features, f"{store.metadata.fingerprint()} {num_tokens} {names} {context} {dtype}")
    return num_contexts, num_tokens - num_contexts * context


def _hook_names(store: ActivationStore, names: Sequence[str]) -> Mapping[str, str]:
    """The TransformerLens name of each array. Raises ConfigError for two arrays with the same one."""
    hooks: dict[str, str] = {}
    for name in names:
        hook = store._root.hook_names[name]
        if hook in ("", "token_ids", *hooks.values()):
            raise ConfigError(
                f"export.arrays: {store.path}/zarr.json has the name {hook!r} for {name}, as for another column. "
                "Export only one of them."
            )
        hooks[name] = hook
    return hooks


def _describe(folder: Path, features: Features, content: str) -> None:
    """Writes the other files that `datasets.load_from_disk` needs."""
    DatasetInfo(features=features).write_to_directory(str(folder))
    state = {
        "_data_files": [{"filename": FILE}],
        "_fingerprint": hashlib.sha256(content.encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
