"""A store's summary, from its metadata, commit records and document tables, without reading arrays."""

import sys
from collections.abc import Mapping

from pipeline.config.choices import SpecialTokens
from pipeline.core.addresses import without_credentials
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.messages import counted
from pipeline.data.text.tokenizer import TextTokenizer, load_tokenizer
from pipeline.store import ActivationStore
from pipeline.store.format.arrays import layout_of
from pipeline.store.format.layout import MIB
from pipeline.store.format.metadata import StoreMetadata, require_root
from pipeline.store.write.finishing import describe_skips


def store_facts(store: ActivationStore) -> dict[str, str]:
    """The facts about a store, by name, for people; without statistics of the activations. Raises StoreError."""
    root, blocks, metadata = require_root(store.storage), store.blocks, store.metadata
    layout, config = layout_of(root), metadata.config
    model, data, batch = metadata.model, metadata.data, metadata.batch
    num_rows = blocks.total("rows")
    padding = 1 - store.num_tokens / max(1, num_rows * layout.length)
    mib, all_mib = (
        num_rows * sum(map(layout.row_bytes, arrays)) / MIB for arrays in (layout.arrays, layout.all_arrays)
    )
    run_model = config.get("model", {})
    facts = {
        "state": f"{'complete' if store.complete else 'unfinished'}, created {root.created}",
        "model": _joined(model.get("family"), model.get("dtype"), run_model.get("path"), run_model.get("adapter")),
        "data": _joined(data.get("source"), config.get("data", {}).get("path"), data.get("dataset")),
        "rows": _joined(f"{layout.length} tokens", batch.get("packing"), batch.get("long_documents")),
        "tokens": f"{store.num_tokens:,} in {num_rows:,} rows; {padding:.1%} of their slots are "
        f"padding{' or context' if batch.get('overlap') else ''}",
        "blocks": f"{len(blocks):,} of {layout.rows_per_block} rows, in {counted(metadata.num_streams, 'stream')}",
        "documents": f"{blocks.total('documents'):,}, counted once per block that has tokens of the document; "
        f"{blocks.total('tokens_cut'):,} tokens cut",
        "skipped": describe_skips(store.storage, blocks),
        "size": f"{mib:,.1f} MiB of activations and {all_mib - mib:,.1f} MiB of side arrays, before compression "
        f"({layout.compression})",
        "fingerprint": metadata.fingerprint()[:16],
        "features": "; ".join(
            f"{sae['features'].removeprefix('features.')}: the {sae['top']} largest of {sae['width']:,}, as "
            f"{sae['dtype']} ({sae.get('activation')})"
            for sae in metadata.encoders
        ),
        str(model.get("weights_dtype")): _rounding("weights", store.weights_error),
        "int8 cache": _rounding("keys, values", store.cache_error),
    }
    if layout.selected is not None:
        how = " ".join([metadata.capture["positions"], *metadata.capture.get("labels", [])])
        share = store.num_activations / max(1, store.num_tokens)
        facts["activations"] = f"for {store.num_activations:,} selected tokens ({how}), {share:.1%} of all tokens"
    return {name: without_credentials(fact) for name, fact in facts.items() if fact}


def _rounding(what: str, errors: Mapping[str, Mapping[str, float | None]] | None) -> str:
    """The errors of quantised weights or of an int8 cache over all arrays; empty if they were not measured."""
    ranges = []
    for name in ("relative_error", "token_median"):
        values = [error[name] for error in (errors or {}).values() if error.get(name) is not None]
        if not values:
            return ""
        ranges.append(f"{min(values)} to {max(values)}")
    return f"{what}; the relative error of activations is {', of a median token '.join(ranges)}"


def find_tokenizer(metadata: StoreMetadata, path: str | None) -> TextTokenizer | None:
    """The store's tokenizer, from `path` or from the run's location; None, with a line on stderr, if it is no longer
    there or has changed.

    Raises ConfigError if `path` contains a different tokenizer.
    """
    expected, model = metadata.tokenizer.get("sha256"), metadata.config.get("model", {})
    location = path or model.get("tokenizer") or model.get("path")
    if location is None:
        return None
    try:
        revision = None if path else model.get("revision")
        tokenizer = load_tokenizer(location, revision=revision, special_tokens=SpecialTokens.none)  # it only decodes
        if (sha256 := tokenizer.identity()["sha256"]) != expected is not None:
            raise ConfigError(
                f"{f'inspect.tokenizer={path}' if path else without_credentials(location)} is not the store's "
                f"tokenizer: its sha256 is {sha256}, expected {expected}. Set inspect.tokenizer to that of the run."
            )
    except PipelineError as error:
        if path:
            raise
        print(f"tokens are shown as ids: {error}", file=sys.stderr)
        return None
    return tokenizer


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)
