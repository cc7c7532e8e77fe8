"""Exports a store's features in the format of EleutherAI's delphi (`LatentCache`), for its `LatentDataset`.

There is one folder per SAE, with config.json and a file per range of features: `{first}_{last}.safetensors` with
`locations` [num_firings, 3] (context, position, feature - first), `activations` [num_firings] and `tokens` [contexts,
context].

m: firings.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from tqdm import tqdm

from pipeline.core.addresses import without_credentials
from pipeline.core.errors import ConfigError
from pipeline.store import ActivationStore
from pipeline.store.read.exports import converted, new_folder, require_context

BATCH_SIZE = 4096  # tokens
_PREFIX = "features."
_DTYPES = {"int64": "I64", "float32": "F32", "float16": "F16", "uint32": "U32"}


class _Split(NamedTuple):
    """The file of one SAE's features first .. last, and the file of its records until all are known.

    record: the dtype of (location, activation).
    """

    path: Path
    first: int
    last: int
    record: np.dtype

    @property
    def records_path(self) -> Path:
        return self.path.with_suffix(".records")

    def append(self, places: Int64[np.ndarray, "m 2"], index: Int64[np.ndarray, " m"], values: np.ndarray) -> None:
        """Writes those of m firings whose features are in the range.

        places: (context, position). index: features. values: [m].
        """
        in_range = (index >= self.first) & (index <= self.last)
        records = np.empty(in_range.sum(), self.record)
        records["location"] = np.column_stack([places[in_range], index[in_range] - self.first])
        records["activation"] = values[in_range]
        with self.records_path.open("ab") as file:
            records.tofile(file)

    def finish(self, tokens: Int64[np.ndarray, "contexts context"]) -> None:
        """Writes the file from its records, which must fit into memory: delphi reads it whole, too."""
        records = np.fromfile(self.records_path, self.record)
        arrays = {"tokens": tokens, "activations": records["activation"], "locations": records["location"]}
        _write_safetensors(self.path, arrays)
        self.records_path.unlink()


def _write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays in the order of falling item sizes, so that all are aligned."""
    header, end = {}, 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            array.tofile(file)


def write_latents(
    store: ActivationStore, path: Path, names: Sequence[str], context: int, splits: int, dtype: str
) -> tuple[int, int, int, int]:
    """Writes the features of the SAEs `names`, as in `Batch.features`, to the folder `path`. Returns the number of
    contexts, of tokens that were left out at the end, of firings, and of firings that the store lacks
    (`capture.encode_top`).

    context: tokens per context. Contexts are cut from the stored tokens in row order, without padding. splits: files
    per SAE. dtype: that of the features' values.

    Raises ConfigError for unknown names, a store of selected tokens, or with less than one context, an SAE with fewer
    features than `splits`, and values that do not fit into `dtype`; StoreError; and what `new_folder` raises.
    """
    widths = {sae["features"].removeprefix(_PREFIX): sae["width"] for sae in store.metadata.encoders}
    if unknown := sorted(set(names) - set(widths)):
        raise ConfigError(f"export.arrays: the store has no features of {unknown}; it has {sorted(widths)}.")
    if store._layout.selected is not None:
        raise ConfigError(
            f"{store.path} has features of selected tokens only (capture.positions), but delphi shows the text around "
            "them. Export a store with the features of all tokens."
        )
    require_context(store, context)
    contexts, left = divmod(store.num_activations, context)
    if narrow := sorted(name for name in names if widths[name] < splits):
        raise ConfigError(f"export.splits={splits}: {narrow[0]} has only {widths[narrow[0]]} features. Lower it.")
    with new_folder(path) as folder:
        record = np.dtype([("location", np.uint32, 3), ("activation", dtype)])
        divided = {name: _splits(folder / name, widths[name], splits, record) for name in names}
        firings, not_stored = _write_parts(store, folder / "tokens", divided, context, dtype)
        tokens = np.fromfile(folder / "tokens", np.int64).reshape(contexts, context)
        for name, parts in divided.items():
            for split in parts:
                split.finish(tokens)
            config = json.dumps(_config(store, contexts, context, splits), indent=4)
            (folder / name / "config.json").write_text(config)
        (folder / "tokens").unlink()
    return contexts, left, firings, not_stored


def _splits(folder: Path, width: int, splits: int, record: np.dtype) -> list[_Split]:
    folder.mkdir()
    edges = pairwise(width * k // splits for k in range(splits + 1))
    return [_Split(folder / f"{first}_{end - 1}.safetensors", first, end - 1, record) for first, end in edges]


def _write_parts(
    store: ActivationStore, tokens: Path, divided: Mapping[str, list[_Split]], context: int, dtype: str
) -> tuple[int, int]:
    """Reads the store once. Returns the number of firings written, and the number of those that were not stored."""
    total, first, firings, not_stored = store.num_activations // context * context, 0, 0, 0
    with tokens.open("wb") as file, tqdm(total=total, unit="token", desc="export", file=sys.stderr) as bar:
        for batch in store.batches([], BATCH_SIZE, features=True):
            kept = min(len(batch.tokens), total - first)
            file.write(batch.tokens[:kept].astype(np.int64).tobytes())
            for name, splits in divided.items():
                values, index, indptr = batch.features[name].csr()
                values, index = converted(name, values[: indptr[kept]], dtype), index[: indptr[kept]]
                numbers = first + np.repeat(np.arange(kept), np.diff(indptr[: kept + 1]))
                places = np.column_stack(np.divmod(numbers, context))
                for split in splits:
                    split.append(places, index, values)
                firings += len(index)
                not_stored += int(batch.features[name].n_active[:kept].sum()) - len(index)
            first += kept
            bar.update(kept)
    return firings, not_stored


def _config(store: ActivationStore, contexts: int, context: int, splits: int) -> Mapping[str, object]:
    """The keys of delphi's CacheConfig that it uses when it loads the features."""
    model, data = (store.metadata.config.get(part) or {} for part in ("model", "data"))
    is_files = data.get("source") == "parquet" and data.get("path")  # unlike a Hub dataset, these have no subset
    return {
        "dataset_repo": without_credentials(str(data.get("path") or data.get("repo") or "")),
        "dataset_split": data.get("split") or "",
        "dataset_name": "" if is_files else data.get("subset") or "",
        "dataset_column": data.get("text_column") or "text",
        "cache_ctx_len": context,
        "ctx_len": context,
        "n_tokens": contexts * context,
        "n_splits": splits,
        "model_name": without_credentials(str(model.get("path") or "")),
    }
