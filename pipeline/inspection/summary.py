"""A store's summary, from its metadata, commit records, document tables and logs, without reading arrays."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from pipeline.core.addresses import without_credentials
from pipeline.core.errors import StoreInvalid
from pipeline.store import ActivationStore
from pipeline.store.check.skips import describe_skips
from pipeline.store.format.arrays import layout_of
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import MIB, ArraySpec, StoreLayout
from pipeline.store.format.metadata import StoreRoot, read_root
from pipeline.store.format.tables import read_tables
from pipeline.store.io.parsing import parse_store_json

# The maximum number of document tables to read, from evenly spaced blocks.
MAX_TABLES = 64

_LOG_LIMIT = 1 << 62  # numbers in a run's log are below it; NaN is not


@dataclass(frozen=True)
class Summary:
    """A store without its activations.

    blocks: in the order of their rows. document_tokens: lengths of the documents in up to MAX_TABLES blocks.
    skips: what was left out of the input.
    storage_errors: `Statistics.relative_error` by array name, if the store is complete and its dtype is scaled.
    runs: the lines of each run's log, by name; a line is a `pipeline.job.metrics.Metrics.snapshot()`.
    """

    path: str
    root: StoreRoot
    layout: StoreLayout
    blocks: BlockTable
    document_tokens: np.ndarray
    storage_errors: Mapping[str, float]
    skips: str
    runs: Mapping[str, list[Mapping[str, Any]]]

    @property
    def num_tokens(self) -> int:
        return self.blocks.total("tokens")

    @property
    def num_rows(self) -> int:
        return self.blocks.total("rows")

    @property
    def padding(self) -> float:
        """The share of the stored rows' slots without a token."""
        return 1 - self.num_tokens / max(1, self.num_rows * self.layout.length)

    def mib(self, arrays: Iterable[ArraySpec]) -> float:
        """MiB of the arrays' stored rows, before compression."""
        return self.num_rows * sum(map(self.layout.row_bytes, arrays)) / MIB

    def lines(self) -> list[str]:
        """The summary to print, without statistics of the activations."""
        metadata, config = self.root.metadata, self.root.metadata.config
        model, data, batch = metadata.model, metadata.data, metadata.batch
        per_stream = np.bincount(self.blocks.column("stream"), minlength=metadata.num_streams).tolist()
        cut = self.blocks.total("tokens_cut")
        side_arrays = [spec for spec in self.layout.all_arrays if spec not in self.layout.arrays]
        facts = {
            "state": f"{'complete' if self.root.complete else 'unfinished'}, created {self.root.created}",
            "model": _joined(model.get("family"), model.get("dtype"), config.get("model", {}).get("path")),
            "data": _joined(data.get("source"), config.get("data", {}).get("path"), data.get("dataset")),
            "rows": _joined(f"{self.layout.length} tokens", batch.get("packing"), batch.get("long_documents")),
            "tokens": f"{self.num_tokens:,} in {self.num_rows:,} rows; {self.padding:.1%} of their slots are padding",
            "blocks": f"{len(self.blocks):,} of {self.layout.rows_per_block} rows; by stream: {_counts(per_stream)}",
            "documents": f"{self.blocks.total('documents'):,}, counted once per block that has tokens of the document; "
            f"{cut:,} tokens cut",
            "skipped": self.skips,
            "size": f"{self.mib(self.layout.arrays):,.1f} MiB of activations and {self.mib(side_arrays):,.1f} MiB of "
            f"side arrays, before compression ({self.layout.compression})",
            "fingerprint": metadata.fingerprint()[:16],
        }
        if metadata.encoders:
            facts["features"] = "; ".join(
                f"{sae['features'].removeprefix('features.')}: the {sae['top']} largest of {sae['width']:,}, as "
                f"{sae['dtype']} ({sae.get('activation')})"
                for sae in metadata.encoders
            )
        if self.layout.selected is not None:
            stored = self.blocks.total("activations")
            slots = self.num_rows * self.layout.selected
            facts["activations"] = (
                f"for {stored:,} selected tokens ({metadata.capture['positions']}), "
                f"{stored / max(1, self.num_tokens):.1%} of all tokens; of the {self.layout.selected} slots per row, "
                f"{1 - stored / max(1, slots):.1%} are empty"
            )
        measured = {"int8": ("weights", self.root.weights_error), "int8 cache": ("keys, values", self.root.cache_error)}
        for name, (what, errors_by_array) in measured.items():
            for measure, of in {"relative_error": "activations", "token_median": "a median token"}.items():
                errors = [e[measure] for e in (errors_by_array or {}).values() if e.get(measure) is not None]
                if errors:
                    text = f"the relative error of {of} is {min(errors)} to {max(errors)}"
                    facts[name] = f"{facts[name]}, {text}" if name in facts else f"{what}; {text}"
        if self.storage_errors:
            low, high = min(self.storage_errors.values()), max(self.storage_errors.values())
            facts["rounding"] = (
                f"the relative error of storing as {metadata.capture['dtype']} is {low:.3g} to {high:.3g}"
            )
        return [self.path, *(without_credentials(f"  {name:12}{text}") for name, text in facts.items() if text)]


def summarise(store: ActivationStore) -> Summary:
    """Reads a store's summary. Raises StoreError."""
    storage = store.storage
    root = read_root(storage)
    if root is None:
        raise StoreInvalid(f"{store.path} has no zarr.json any more: it was deleted while it was being read.")
    blocks = store.blocks
    step = -(-len(blocks) // MAX_TABLES) or 1
    lengths = [table["n_tokens"] for table in read_tables(storage, blocks[::step])]
    logs = [key for key in storage.list_keys("_metrics/") if key.endswith(".jsonl")]
    has_statistics = root.complete and len(blocks) and blocks.has_statistics.all()
    is_measured = has_statistics and root.metadata.has_scales
    errors = {key.name: store.statistics(key).relative_error for key in store.keys if is_measured}
    runs = {key: _snapshots(key, text) for key, text in zip(logs, storage.read_many(logs), strict=True)}
    return Summary(
        path=store.path,
        root=root,
        layout=layout_of(root),
        blocks=blocks,
        document_tokens=np.concatenate([np.empty(0, np.int64), *(pc.drop_null(column) for column in lengths)]),
        skips=describe_skips(storage, blocks),
        storage_errors={name: error for name, error in errors.items() if error is not None},
        runs={key.removeprefix("_metrics/"): snapshots for key, snapshots in runs.items() if snapshots},
    )


def _snapshots(key: str, text: bytes | None) -> list[Mapping[str, Any]]:
    remedy = "Delete it: nothing depends on it."
    snapshots = [parse_store_json(line, f"{key}, a run's log,", remedy) for line in (text or b"").splitlines()]
    if not all(map(_is_snapshot, snapshots)):
        raise StoreInvalid(f"{key} is not a run's log: expected a JSON object of numbers on each line. {remedy}")
    return snapshots


def _is_snapshot(line: Any) -> bool:
    """Whether a line of a log has the finite numbers that the charts and the page need."""
    stages = line.get("seconds") if isinstance(line, dict) else None
    if not isinstance(stages, dict) or not all(isinstance(stage, dict) for stage in stages.values()):
        return False
    numbers = [line.get(name) for name in ("elapsed_s", "tokens", "tokens_per_s", "peak_rss_mib")]
    numbers += [value for stage in stages.values() for value in stage.values()]
    return all(type(n) in (int, float) and abs(n) < _LOG_LIMIT for n in numbers)


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def _counts(per_stream: list[int]) -> str:
    if len(per_stream) <= 16:
        return " ".join(map(str, per_stream))
    return f"{min(per_stream)} to {max(per_stream)} in {len(per_stream)} streams"
