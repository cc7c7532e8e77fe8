"""The README.md of a store's repository on the Hub: what the store contains, and how to read it."""

import math
from collections.abc import Iterator
from urllib.parse import quote

from huggingface_hub import DatasetCard, DatasetCardData

from pipeline.core.errors import ConfigError
from pipeline.core.hub import is_hub_id
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.read.reader import ActivationStore

CARD_KEY = "README.md"

_TAGS = ("activations", "interpretability", "zarr")
_BEGIN = "<!-- begin activation store: python -m pipeline.push replaces the lines from here to the end mark -->"
_END = "<!-- end activation store -->"
_SIZES = {1_000: "n<1K", 10**4: "1K<n<10K", 10**5: "10K<n<100K", 10**6: "100K<n<1M", 10**7: "1M<n<10M"}
_SIZES |= {10**8: "10M<n<100M", 10**9: "100M<n<1B", 10**10: "1B<n<10B", 10**11: "10B<n<100B", 10**12: "100B<n<1T"}


def card(store: ActivationStore, repo: str, revision: str, present: str | None) -> str:
    """The text of the card, with front matter.

    present: the repository's card, if any. Its text outside of the marks is kept. Its front matter is kept too (without
    comments), except that `size_categories` is replaced and tags are added.

    Raises ConfigError if its front matter cannot be read, or if the end mark is missing.
    """
    title = f"# Activations of {_name(store.metadata, 'model')}"
    description = "\n".join([_BEGIN, *_description(store, repo, revision), _END])
    try:
        merged = DatasetCard(f"---\n{{}}\n---\n{title}\n\n{description}\n" if present is None else present)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the front matter of {CARD_KEY} in {repo} cannot be read: {error}. Correct it.") from error
    data: DatasetCardData = merged.data
    tags = data.get("tags") or []
    tags = [tags] if isinstance(tags, str) else tags
    data["tags"] = [*tags, *(tag for tag in _TAGS if tag not in tags)]
    data["size_categories"] = [_size(store.num_activations)]
    if data.get("viewer") is None:
        data["viewer"] = False  # it would show the document tables as the dataset
    if _BEGIN in merged.text:
        before, _, rest = merged.text.partition(_BEGIN)
        _, end, after = rest.partition(_END)
        if not end:
            raise ConfigError(
                f"{CARD_KEY} in {repo} has the mark {_BEGIN!r} without {_END!r} after it. Add the latter."
            )
        merged.text = before + description + after
    elif present is not None:
        merged.text = f"{merged.text.rstrip()}\n\n{description}\n"
    return str(merged)


def _description(store: ActivationStore, repo: str, revision: str) -> Iterator[str]:
    metadata = store.metadata
    suffix = "" if revision == "main" else f"@{quote(revision, safe='')}"
    yield ""
    yield f"Activations of `{_name(metadata, 'model')}` on `{_name(metadata, 'data')}`."
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| tokens | {store.num_tokens:,} |"
    if store.num_activations != store.num_tokens:
        yield f"| tokens with activations | {store.num_activations:,} |"
    yield f"| rows | {len(store.rows):,} of {store.length:,} positions |"
    yield f"| blocks | {len(store.blocks):,} |"
    yield f"| fingerprint | `{metadata.fingerprint()}` |"
    yield ""
    yield "| array | shape | dtype | MB |"
    yield "|---|---|---|---|"
    for name, array in store.arrays.items():
        shape = " x ".join(f"{n:,}" for n in array.shape)
        size = math.prod(array.shape) * array.dtype.numpy_dtype.itemsize
        yield f"| `{name}` | {shape} | {array.dtype.name} | {size / 1e6:,.2f} |"
    yield ""
    yield "MB are before compression and without the padding rows of a stream's last block."
    yield ""
    yield "    from pipeline.store import ActivationStore"
    yield ""
    yield f'    store = ActivationStore.open("hf://datasets/{repo}{suffix}")'
    arguments = "store.keys" if store.keys else "[], features=True"
    yield f"    for batch in store.batches({arguments}, batch_size=4096, shuffle=True, seed=0):"
    yield f"        batch.{'activations' if store.keys else 'features'}, batch.tokens, batch.documents"
    yield ""
    yield "The store is a Zarr v3 group, which zarr-python, xarray and TensorStore can also read. Its attributes"
    yield "contain the configuration."


def _name(metadata: StoreMetadata, group: str) -> str:
    """The name of the model or the data in the store's configuration: a Hub id, or the last part of a path, since the
    rest of a path may be private."""
    values = metadata.config.get(group, {})
    path = values.get("path") or values.get("repo") or f"unnamed {group}"
    return path if is_hub_id(path) else path.rstrip("/").rpartition("/")[2]


def _size(count: int) -> str:
    return next((name for limit, name in _SIZES.items() if count < limit), "n>1T")
