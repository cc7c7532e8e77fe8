"""Exports a store's features in the format of EleutherAI's delphi (`LatentCache`), for its `LatentDataset`.

There is one folder per SAE, with config.json and a file per range of features: `{first}_{last}.safetensors` with
`locations` [num_firings, 3] (context, position, feature - first), `activations` [num_firings] and `tokens` [contexts,
context].

Shapes: n rows, S slots per row, k features stored per token, m firings.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64
from tqdm import tqdm

from pipeline.core.addresses import without_credentials
from pipeline.core.errors import ConfigError
from pipeline.core.file_errors import named_writing_errors
from pipeline.store import ActivationStore
from pipeline.store.format.layout import FEATURE_PARTS, MIB
from pipeline.store.read.exports.saelens import converted
from pipeline.store.read.rows import at_selected

UNFINISHED = "delphi.unfinished"  # the folder for all files until they are complete
BATCH_MIB = 4  # of stored features, read at a time; processing them takes about ten times as much memory
_PREFIX = "features."
_UINT16_VALUES = 1 << 16


@dataclass(frozen=True)
class Exported:
    """What was exported.

    contexts: the number of contexts. left_tokens: tokens at the end, fewer than a context, that were left out.
    firings: the number of firings of all SAEs. not_stored: the number of further firings, which the store lacks because
    of `capture.encode_top`.
    """

    contexts: int
    left_tokens: int
    firings: int
    not_stored: int


@dataclass(frozen=True)
class _Split:
    """The file of one SAE's features first .. last, written as several parts that are joined at the end. dtype: that of
    `locations`."""

    folder: Path
    first: int
    last: int
    dtype: np.dtype

    @cached_property
    def _parts(self) -> Mapping[str, Path]:
        return {name: self.folder / f"{self.first}.{name}" for name in ("activations", "locations")}

    def append(self, places: Int64[np.ndarray, "m 2"], index: Int32[np.ndarray, " m"], values: np.ndarray) -> int:
        """Writes those of m firings whose features are in the range, and returns their number.

        places: (context, position). index: features. values: [m].
        """
        in_range = (index >= self.first) & (index <= self.last)
        locations = np.column_stack([places[in_range], index[in_range] - self.first]).astype(self.dtype)
        for name, array in (("activations", values[in_range]), ("locations", locations)):
            with self._parts[name].open("ab") as part:
                part.write(array.tobytes())
        return len(locations)

    def finish(self, tokens: Path, contexts: int, context: int, dtype: str) -> None:
        """Joins the parts into one safetensors file, those with the widest numbers first, so that all are aligned."""
        parts = {"tokens": tokens, **self._parts}
        num_firings = self._parts["activations"].stat().st_size // np.dtype(dtype).itemsize
        shapes = {"tokens": [contexts, context], "activations": [num_firings], "locations": [num_firings, 3]}
        dtypes = {"tokens": "I64", "activations": {"float32": "F32", "float16": "F16"}[dtype]}
        dtypes["locations"] = "U16" if self.dtype == np.uint16 else "U32"
        header, end = {}, 0
        for name, part in parts.items():
            begin, end = end, end + part.stat().st_size
            header[name] = {"dtype": dtypes[name], "shape": shapes[name], "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (self.folder / f"{self.first}_{self.last}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in parts.values():
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file, MIB)
            file.flush()
            os.fsync(file.fileno())
        for part in self._parts.values():
            part.unlink()


def write_latents(
    store: ActivationStore, path: Path, names: Sequence[str], context: int, splits: int, dtype: str
) -> Exported:
    """Writes the features of the SAEs `names`, as in `Batch.features`, to the folder `path`.

    context: tokens per context. Contexts are cut from the stored tokens in row order, without padding. splits: files
    per SAE. dtype: that of the features' values. Files of an interrupted export are replaced.

    Raises ConfigError for a folder with any other files, unknown names, a store with less than one context, an SAE with
    fewer features than `splits`, and values that do not fit into `dtype`; StoreError; PipelineError if the files cannot
    be written.
    """
    widths = {sae["features"].removeprefix(_PREFIX): sae["width"] for sae in store.metadata.encoders}
    if unknown := sorted(set(names) - set(widths)):
        raise ConfigError(f"export.arrays: the store has no features of {unknown}; it has {sorted(widths)}.")
    contexts = store.num_tokens // context
    if not contexts:
        raise ConfigError(
            f"{store.path} has {store.num_tokens} tokens, less than one context of {context}. Lower export.context."
        )
    if narrow := sorted(name for name in names if widths[name] < splits):
        raise ConfigError(f"export.splits={splits}: {narrow[0]} has only {widths[narrow[0]]} features. Lower it.")
    with named_writing_errors(f"export.path={path}"), _unfinished(path, names) as folder:
        divided = {name: _splits(folder / name, widths[name], splits, contexts, context) for name in names}
        firings, not_stored = _write_parts(store, folder / "tokens", divided, contexts, context, dtype)
        for name, parts in divided.items():
            for split in parts:
                split.finish(folder / "tokens", contexts, context, dtype)
            config = json.dumps(_config(store, contexts, context, splits), indent=4)
            (folder / name / "config.json").write_text(config)
        (folder / "tokens").unlink()
    return Exported(contexts, store.num_tokens - contexts * context, firings, not_stored)


@contextmanager
def _unfinished(path: Path, names: Sequence[str]) -> Iterator[Path]:
    """A folder in `path` to write to. Its content is moved to `path` at the end, or deleted after an error.

    Raises ConfigError if `path` has anything that is not from an interrupted export.
    """
    present = {file.name for file in path.iterdir()} if path.exists() else set()
    if present and (UNFINISHED not in present or present - {UNFINISHED, *names}):
        raise ConfigError(f"export.path={path} is not empty. Choose a different path, or delete its content.")
    for name in present:
        shutil.rmtree(path / name)
    folder = path / UNFINISHED
    folder.mkdir(parents=True)
    try:
        yield folder
        for finished in sorted(folder.iterdir()):
            finished.rename(path / finished.name)
        folder.rmdir()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _splits(folder: Path, width: int, splits: int, contexts: int, context: int) -> list[_Split]:
    folder.mkdir()
    edges = [width * k // splits for k in range(splits + 1)]
    num_values = max(contexts, context, -(-width // splits))
    dtype = np.dtype(np.uint16 if num_values <= _UINT16_VALUES else np.uint32)
    return [_Split(folder, first, end - 1, dtype) for first, end in pairwise(edges)]


def _write_parts(
    store: ActivationStore, tokens: Path, divided: Mapping[str, list[_Split]], contexts: int, context: int, dtype: str
) -> tuple[int, int]:
    """Reads the store once. Returns the number of firings written, and the number of those that were not stored."""
    first = firings = not_stored = 0
    with tokens.open("wb") as file, tqdm(total=store.num_tokens, unit="token", desc="export", file=sys.stderr) as bar:
        for rows in np.array_split(store.rows, _num_batches(store)):
            text = store.read_tokens(rows, whole=True)
            valid = text.segments > 0
            numbers = first + np.cumsum(valid).reshape(valid.shape) - 1
            is_kept = valid & (numbers < contexts * context)
            file.write(text.tokens[is_kept].astype(np.int64).tobytes())
            slot_numbers = at_selected(np.where(is_kept, numbers, -1), store.read_selected(rows), -1)
            outputs = store.read_outputs(
                rows, [f"{_PREFIX}{name}.{part}" for name in divided for part in FEATURE_PARTS]
            )
            for name, splits in divided.items():
                index, values, n_active = (outputs[f"{_PREFIX}{name}.{part}"] for part in FEATURE_PARTS)
                not_stored += int(n_active.sum() - (index >= 0).sum())
                places, index, values = _firings(slot_numbers, index, converted(name, values, dtype), context)
                firings += sum(split.append(places, index, values) for split in splits)
            first += int(valid.sum())
            bar.update(int(valid.sum()))
    return firings, not_stored


def _num_batches(store: ActivationStore) -> int:
    row_bytes = sum(store._layout.row_bytes(spec) for spec in store._layout.outputs if spec.name.startswith(_PREFIX))
    return max(1, -(-len(store.rows) * row_bytes // (BATCH_MIB * MIB)))


def _firings(
    numbers: Int64[np.ndarray, "n S"], index: Int32[np.ndarray, "n S k"], values: np.ndarray, context: int
) -> tuple[Int64[np.ndarray, "m 2"], Int32[np.ndarray, " m"], np.ndarray]:
    """The (context, position), feature and value of each firing, sorted by token and feature.

    numbers: the number, within the export, of the token in each slot; -1 where there is none.
    """
    order = np.argsort(index, axis=-1)
    index, values = np.take_along_axis(index, order, axis=-1), np.take_along_axis(values, order, axis=-1)
    fires = (index >= 0) & (numbers >= 0)[..., None]
    token = np.broadcast_to(numbers[..., None], index.shape)[fires]
    return np.column_stack(np.divmod(token, context)), index[fires], values[fires]


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
