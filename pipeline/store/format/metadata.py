"""A store's metadata, its fingerprint, and the differences between two stores' metadata.

It is attributes["activation_store"] of the root zarr.json.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from shlex import quote
from typing import Any, NamedTuple

from pipeline.core.errors import StoreInvalid, StoreMismatch
from pipeline.data.text.labels import LABELS
from pipeline.store.format.keys import encoded_array, is_activation_name
from pipeline.store.format.layout import (
    ITEM_BYTES,
    LARGEST,
    OUTPUTS,
    SELECTED,
    TOKENS,
    ArraySpec,
    feature_specs,
    output_specs,
)
from pipeline.store.format.target import ALL, Target
from pipeline.store.io.failures import ROOT_REMEDY
from pipeline.store.io.parsing import Each, Of, integers, json_digest, mismatch, one_of, parse_store_json
from pipeline.store.io.storage import Storage

FORMAT_VERSION = 1
ATTRIBUTE = "activation_store"
ROOT_KEY = "zarr.json"

_GROUP = {"zarr_format": 3, "node_type": "group"}

# Checked so that an edited root causes an error message instead of a traceback or huge allocations.
_COUNT, _LENGTH, _WIDTH = integers(0, 1 << 62), integers(1, 1 << 24), integers(1, 1 << 24)
_NAMED = Of(lambda v: isinstance(v, dict) and len(v) <= 1 << 16 and all(map(is_activation_name, v)), "named arrays")
_SHA256 = Of(lambda v: isinstance(v, str) and re.fullmatch("[0-9a-f]{64}", v) is not None, "a sha256")
_FEATURES = Of(
    lambda v: isinstance(v, str) and is_activation_name(encoded_array(v)), "the prefix of the names of an SAE's arrays"
)
_ENCODER = {
    "features": _FEATURES,
    "top": _WIDTH,
    "width": integers(1, 1 << 26),
    "dtype": one_of(("bfloat16", "float32")),
}
_NULL = Of(lambda v: v is None, "null")
_SUMMARY = {"blocks": _SHA256, "statistics": (None, _SHA256)}
_ARRAYS = Each({"width": _WIDTH, "hook_name": str, "scale_groups": (None, _WIDTH)})
_ERRORS = (None, Each(Each((None, float))))
_ATTRIBUTES = {
    "num_streams": integers(1, 1 << 20),  # each takes memory and time
    "rows_per_block": _LENGTH,
    "arrays": _NAMED,
    "selected": (None, _LENGTH),
    "complete": bool,
    "created": str,
    "fingerprint": str,
    "summary": (None, _SUMMARY | {"ids": _NULL}, _SUMMARY | {"ids": _SHA256, "ids_bytes": integers(1, 1 << 40)}),
    "target": Of(lambda v: v == ALL or _COUNT.holds(v), f"{ALL} or {_COUNT.name}"),
    "weights_error": _ERRORS,
    "cache_error": _ERRORS,
    "model": dict,
    "tokenizer": dict,
    "data": {"labels?": Of(lambda v: v == list(LABELS), f"the labels {', '.join(LABELS)}")},
    "batch": {"length": _LENGTH},
    "capture": {
        "dtype": one_of(ITEM_BYTES),
        "statistics": bool,
        "outputs?": [one_of(OUTPUTS)],
        "top_logprobs?": _WIDTH,
        "encode?": [_ENCODER],
    },
    "store": {"compression?": one_of(("none", "zstd")), "shard_bytes?": integers(1, 1 << 38)},
    "config": {
        "run": {"max_tokens": (None, _COUNT), "lease_s?": float},
        "model?": {"path?": (None, str), "tokenizer?": (None, str)},
        "data?": {"path?": (None, str), "revision?": (None, str)},
        **dict.fromkeys(("capture?", "batch?", "store?"), dict),
    },
}

Json = Mapping[str, Any]


class Difference(NamedTuple):
    """A dotted key whose stored value differs from the requested one. The value of an absent key is None."""

    key: str
    stored: Any
    asked: Any


@dataclass(frozen=True)
class StoreMetadata:
    """What determines a store's content, and in `config`, for information, the configuration that created it.

    Every value is plain JSON. The fingerprint covers everything except `config` and, in `store`, all but the
    compression and `shard_bytes` (if there is one).
    """

    model: Json
    tokenizer: Json
    data: Json
    batch: Json
    capture: Json
    store: Json
    num_streams: int
    rows_per_block: int
    config: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Encoded and decoded, so that metadata read from a store equals what was written.
        for f in fields(self):
            object.__setattr__(self, f.name, json.loads(json.dumps(getattr(self, f.name))))

    @property
    def selects(self) -> bool:
        """Whether the activations of only some tokens are stored."""
        return "positions" in self.capture

    @property
    def has_statistics(self) -> bool:
        return self.capture["statistics"] and bool(self.capture.get("arrays") or self.encoders)

    @property
    def has_scales(self) -> bool:
        return self.capture.get("dtype") in LARGEST

    @property
    def outputs(self) -> tuple[ArraySpec, ...]:
        """The arrays of `capture.outputs` and of SAEs."""
        slots = SELECTED.slots if self.selects else TOKENS.slots
        head_specs = output_specs(self.capture.get("outputs", ()), self.capture.get("top_logprobs", 0), slots)
        reconstructed = self.reconstructed
        sae_specs = (
            feature_specs(sae["features"], sae["top"], sae["dtype"], slots, reconstructed.get(sae["features"]))
            for sae in self.encoders
        )
        return (*head_specs, *(spec for specs in sae_specs for spec in specs))

    @property
    def encoders(self) -> tuple[Json, ...]:
        """The SAEs, in order; the value of `features` is the prefix of the names of an SAE's arrays."""
        return tuple(self.capture.get("encode", ()))

    @property
    def reconstructed(self) -> dict[str, str]:
        """The array that each SAE reconstructs, by the prefix of its arrays' names, for those whose error is
        measured."""
        return {sae["features"]: encoded_array(sae["features"]) for sae in self.encoders if sae.get("error") is True}

    @property
    def indexed_features(self) -> tuple[str, ...]:
        """The prefixes of the arrays' names of SAEs that have an index by feature."""
        return tuple(sae["features"] for sae in self.encoders) if self.capture.get("encode_index") is True else ()

    def content(self) -> dict[str, Any]:
        """What the fingerprint covers."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("config", "store")}
        settings = {name: self.store[name] for name in ("shard_bytes",) if name in self.store}
        return content | {"store": {"compression": self.store.get("compression", "none"), **settings}}

    def fingerprint(self) -> str:
        """The sha256 of the canonical JSON of `content()`, as hex. Its text is not escaped, unlike in `json_digest`."""
        canonical = json.dumps(self.content(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def differences(self, asked: "StoreMetadata") -> list[Difference]:
        """The keys of this store's content whose values differ from those in `asked`."""
        stored, wanted = (dict(_leaves(metadata.content())) for metadata in (self, asked))
        pairs = (Difference(key, stored.get(key), wanted.get(key)) for key in {**stored, **wanted})
        return [pair for pair in pairs if pair.stored != pair.asked]

    def require_same(self, asked: "StoreMetadata", path: str) -> None:
        """Raises StoreMismatch, listing every key that differs, unless `asked` has this store's fingerprint."""
        different = self.differences(asked)
        if different:
            lines = "".join(
                f"\n  {d.key}: the store has {_shown(d.stored)}, this run asks for {_shown(d.asked)}" for d in different
            )
            raise StoreMismatch(
                f"the store {path} was made with a different configuration:{lines}\n"
                "Use the configuration, model and data of this store, or choose a different store.path. This command "
                "describes the store, and says how to delete it:\n"
                f"  python -m pipeline.delete {quote(f'store.path={path}')}"
            )


@dataclass(frozen=True)
class StoreRoot:
    """The content of the root zarr.json, from which the store's layout is derived (`layout_of`).

    arrays: by name of an activation array, in order: its `width`, the number of features; its `hook_name` in
    TransformerLens; and `scale_groups`, into how many groups the features of a scaled array are divided, else None.
    created: UTC, ISO 8601; the only value that differs between two runs of one configuration.
    target: how many tokens the store is to hold; it only grows.
    selected: slots per row for selected tokens; None where the activations of all tokens are stored.
    complete: whether the store has all blocks.
    summary: the sha256 of the files in `_summary/` that a finished store has, see `summary.py`; None before.
    weights_error: by array, the relative error caused by quantised weights.
    cache_error: by array and for final_norm, the relative error caused by int8 keys and values (data=generate).
    """

    metadata: StoreMetadata
    arrays: Mapping[str, Json]
    created: str
    target: Target
    selected: int | None = None
    complete: bool = False
    summary: Mapping[str, str | int | None] | None = None
    weights_error: Json | None = None
    cache_error: Json | None = None

    @property
    def hook_names(self) -> dict[str, str]:
        """By name of an activation array: its name in TransformerLens."""
        return {name: array["hook_name"] for name, array in self.arrays.items()}

    def to_json(self) -> bytes:
        """The text of zarr.json, with a checksum that reveals edits."""
        own = [f.name for f in fields(self) if f.name != "metadata"]
        attributes = {
            "version": FORMAT_VERSION,
            **{name: getattr(self, name) for name in own},
            **{f.name: getattr(self.metadata, f.name) for f in fields(self.metadata)},
            "fingerprint": self.metadata.fingerprint(),
            "software": _software(),
        }
        group = {**_GROUP, "attributes": {ATTRIBUTE: attributes}}
        attributes["sha256"] = json_digest(group)
        return (json.dumps(group, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes, path: str) -> "StoreRoot":
        """Raises StoreInvalid if the group at `path` is damaged or not an activation store of this format version."""
        subject = f"{path}/{ROOT_KEY}"
        attributes = _checked_attributes(parse_store_json(text, subject, ROOT_REMEDY), path)
        if what := mismatch(attributes, _ATTRIBUTES) or mismatch(attributes["arrays"], _ARRAYS, "arrays"):
            raise StoreInvalid(f"{subject} is damaged: {what}. {ROOT_REMEDY}")
        metadata = StoreMetadata(**{f.name: attributes[f.name] for f in fields(StoreMetadata)})
        if attributes["fingerprint"] != metadata.fingerprint():
            raise StoreInvalid(f"{subject} was edited: its fingerprint does not match its content.")
        arrays = attributes["arrays"]
        agree = metadata.capture.get("arrays") in (None, list(arrays))
        agree &= all((array["scale_groups"] is not None) == metadata.has_scales for array in arrays.values())
        if not agree or (attributes["selected"] is not None) != metadata.selects:
            raise StoreInvalid(f"{subject} was edited: arrays, selected and capture disagree.")
        return cls(metadata, **{f.name: attributes[f.name] for f in fields(cls) if f.name != "metadata"})


def _checked_attributes(group: Any, path: str) -> dict[str, Any]:
    """The attributes of a root, which match their checksum. Raises StoreInvalid."""
    subject = f"{path}/{ROOT_KEY}"
    if mismatch(group, {"attributes?": dict}):
        raise StoreInvalid(f"{subject} is not the JSON of a Zarr group.")
    attributes = group.get("attributes", {}).get(ATTRIBUTE)
    if attributes is None:
        raise StoreInvalid(f"{path} is a Zarr group, but not an activation store. Choose a different store.path.")
    if not isinstance(attributes, dict):
        raise StoreInvalid(f"{subject} is damaged: {ATTRIBUTE} is {attributes!r:.80}, expected an object.")
    version = attributes.get("version")
    if version != FORMAT_VERSION:
        raise StoreInvalid(
            f"the store {path} has format version {version!r:.80}, but this program reads version {FORMAT_VERSION}."
        )
    if isinstance(attributes.get("arrays"), list):
        raise StoreInvalid(
            f"the store {path} was made by a development version of this program: commit 6fe0a64 is the last one that "
            "reads it."
        )
    digest = attributes.pop("sha256", None)
    if digest != json_digest(group) or group != {**_GROUP, "attributes": {ATTRIBUTE: attributes}}:
        raise StoreInvalid(f"{subject} does not match its own checksum: it was edited or damaged. {ROOT_REMEDY}")
    return attributes


def read_root(storage: Storage) -> StoreRoot | None:
    """The root of the store; None if there is none. Raises StoreError."""

    def parse(_key: str, text: bytes | None) -> StoreRoot | None:
        return None if text is None else StoreRoot.from_json(text, storage.path)

    return next(storage.read_checked([ROOT_KEY], parse))


def require_root(storage: Storage) -> StoreRoot:
    """The root of a store. Raises StoreInvalid if it is missing or damaged, and StoreError."""

    def read() -> StoreRoot:
        if (root := read_root(storage)) is None:
            raise StoreInvalid(f"there is no activation store at {storage.path}: it has no {ROOT_KEY}.")
        return root

    return storage.retry_read(read)


def change_root(storage: Storage, change: Callable[[StoreRoot], StoreRoot | None]) -> StoreRoot | None:
    """Replaces the root with `change(root)` and returns the new root; None if `change` returns it, which changes
    nothing. Raises StoreError.

    Safe while other processes change the root too: `change` is called again with what they wrote.
    """

    def changed(text: bytes | None) -> tuple[StoreRoot | None, bytes | None]:
        if text is None:
            raise StoreInvalid(f"{storage.path}/{ROOT_KEY} was deleted while the store was being written.")
        root = StoreRoot.from_json(text, storage.path)
        new = change(root)
        return new, None if new in (None, root) else new.to_json()

    return storage.update(ROOT_KEY, changed)


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested dicts, and in lists of dicts, with their dotted keys."""
    if isinstance(value, dict) and (value or not prefix):
        for key, child in value.items():
            yield from _leaves(child, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, child in enumerate(value):
            yield from _leaves(child, f"{prefix}[{number}]")
    else:
        yield prefix, value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _software() -> dict[str, str]:
    versions = {}
    for package in ("activation-pipeline", "tensorstore"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            versions[package] = "unknown"
    return versions
