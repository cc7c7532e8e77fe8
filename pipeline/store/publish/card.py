"""The README.md of a store's repository on the Hub: what the store contains, and how to read it."""

import re
from urllib.parse import quote

from pipeline.core.hub import is_hub_id
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.read.reader import ActivationStore

CARD_KEY = "README.md"

# The viewer would show the document tables as the dataset.
_FRONT_MATTER = "---\ntags: [activations, interpretability, zarr]\nviewer: false\n---"
_BEGIN = "<!-- begin activation store: python -m pipeline.push replaces the lines from here to the end mark -->"
_END = "<!-- end activation store -->"
# From the last of several begin marks: text after one that lost its end mark is the user's.
_MARKED = re.compile(f"{re.escape(_BEGIN)}((?!{re.escape(_BEGIN)}).)*{re.escape(_END)}", re.DOTALL)


def card(store: ActivationStore, repo: str, revision: str, present: str) -> str:
    """The text of the card. `present`: the repository's card, or nothing. Its text outside of the marks is kept."""
    description = f"{_BEGIN}\n{_description(store, repo, revision)}\n{_END}"
    text = present or f"{_FRONT_MATTER}\n# Activations of {_name(store.metadata, 'model')}\n"
    changed, count = _MARKED.subn(lambda _: description, text)
    return changed if count else f"{text.rstrip()}\n\n{description}\n"


def _description(store: ActivationStore, repo: str, revision: str) -> str:
    suffix = "" if revision == "main" else f"@{quote(revision, safe='')}"
    arrays = [
        f"| `{name}` | {' x '.join(f'{n:,}' for n in array.shape)} | {array.dtype.name} |"
        for name, array in store.arrays.items()
    ]
    return f"""
Activations of `{_name(store.metadata, "model")}` on `{_name(store.metadata, "data")}`.

| | |
|---|---|
| tokens | {store.num_tokens:,} |
| tokens with activations | {store.num_activations:,} |
| rows | {len(store.rows):,} of {store.length:,} positions |
| blocks | {len(store.blocks):,} |
| fingerprint | `{store.metadata.fingerprint()}` |

| array | shape | dtype |
|---|---|---|
{chr(10).join(arrays)}

    from pipeline.store import ActivationStore

    store = ActivationStore.open("hf://datasets/{repo}{suffix}")
    for batch in store.batches({"store.keys" if store.keys else "[], features=True"}, batch_size=4096, shuffle=True):
        batch.{"activations" if store.keys else "features"}, batch.tokens, batch.documents

The store is a Zarr v3 group, which zarr-python and xarray can also read. Its attributes contain the configuration."""


def _name(metadata: StoreMetadata, group: str) -> str:
    """The name of the model or the data in the store's configuration: a Hub id, or the last part of a path, since the
    rest of a path may be private."""
    values = metadata.config.get(group, {})
    path = values.get("path") or values.get("repo") or f"unnamed {group}"
    return path if is_hub_id(path) else path.rstrip("/").rpartition("/")[2]
