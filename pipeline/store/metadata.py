"""A store's own description, its fingerprint, and how two of them differ.

It stands in the root zarr.json, under attributes["activation_store"].
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import tensorstore as ts

from pipeline.errors import StoreInvalid, StoreMismatch
from pipeline.store.int8 import DTYPE as INT8
from pipeline.store.int8 import scale_name
from pipeline.store.kvstore import open_kvstore, read_checked, read_key
from pipeline.store.layout import SELECTED, SIDE_ARRAYS, ArraySpec, StoreLayout, scale_spec

FORMAT_VERSION = 1
ATTRIBUTE = "activation_store"
ROOT_KEY = "zarr.json"

Json = Mapping[str, Any]


class Difference(NamedTuple):
    """A dotted key whose value in the store is not the one that was asked for. A missing key has the value None."""

    key: str
    stored: Any
    asked: Any


@dataclass(frozen=True)
class StoreMetadata:
    """What determines a store's content, and (in `config`, for information) the configuration that made it.

    Every value is plain JSON. The fingerprint covers everything but `config`, and of `store` only the compression.
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
        # Through JSON and back, so that what was read from a store compares equal to what was written.
        for f in fields(self):
            object.__setattr__(self, f.name, json.loads(json.dumps(getattr(self, f.name))))

    @property
    def selects(self) -> bool:
        """Whether only some tokens' activations are stored."""
        return "positions" in self.capture

    @property
    def has_scales(self) -> bool:
        return self.capture.get("dtype") == INT8

    def content(self) -> dict[str, Any]:
        """Everything that the fingerprint covers."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("config", "store")}
        return content | {"store": {"compression": self.store.get("compression", "none")}}

    def fingerprint(self) -> str:
        """sha256, as hex, of the canonical JSON of `content()`."""
        canonical = json.dumps(self.content(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def differences(self, asked: "StoreMetadata") -> list[Difference]:
        """The keys at which this store is not what `asked` describes."""
        stored, wanted = dict(_leaves(self.content())), dict(_leaves(asked.content()))
        keys = [*stored, *(key for key in wanted if key not in stored)]
        pairs = (Difference(key, stored.get(key), wanted.get(key)) for key in keys)
        return [pair for pair in pairs if pair.stored != pair.asked]

    def require_same(self, asked: "StoreMetadata", path: str) -> None:
        """Raises StoreMismatch, naming every key that differs, unless `asked` has this store's fingerprint."""
        different = self.differences(asked)
        if different:
            lines = "".join(
                f"\n  {d.key}: the store has {d.stored!r}, this run asks for {d.asked!r}" for d in different
            )
            raise StoreMismatch(
                f"the store {path} was made by another configuration:{lines}\n"
                "Set these keys to the store's values to resume it, or choose another store.path."
            )


@dataclass(frozen=True)
class StoreRoot:
    """The content of the root zarr.json.

    arrays: names of the activation arrays. complete: no block is missing. blocks, commits_sha256: of a complete store,
    the number of blocks of each stream and the sha256 of the consolidated records. weights_error: of a model with int8
    weights, the relative error that they cause by array name. created: UTC, ISO 8601; the only value that differs
    between two runs of one configuration.
    """

    metadata: StoreMetadata
    arrays: tuple[str, ...]
    created: str
    complete: bool = False
    blocks: tuple[int, ...] | None = None
    weights_error: Json | None = None
    commits_sha256: str | None = None

    @property
    def array_names(self) -> tuple[str, ...]:
        """Of all arrays, those beside the activations first."""
        sides = (*SIDE_ARRAYS, SELECTED) if self.metadata.selects else SIDE_ARRAYS
        scales = map(scale_name, self.arrays) if self.metadata.has_scales else ()
        return (*(spec.name for spec in sides), *self.arrays, *scales)

    def to_json(self) -> bytes:
        stored = {f.name: getattr(self.metadata, f.name) for f in fields(self.metadata)}
        attributes = {
            "version": FORMAT_VERSION,
            "complete": self.complete,
            **({} if self.blocks is None else {"blocks": list(self.blocks)}),
            **({} if self.commits_sha256 is None else {"commits_sha256": self.commits_sha256}),
            "arrays": list(self.arrays),
            **({} if self.weights_error is None else {"weights_error": self.weights_error}),
            **stored,
            "fingerprint": self.metadata.fingerprint(),
            "created": self.created,
            "software": _software(),
        }
        group = {"zarr_format": 3, "node_type": "group", "attributes": {ATTRIBUTE: attributes}}
        return (json.dumps(group, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes, path: str) -> "StoreRoot":
        """Raises StoreInvalid when the group at `path` is not an activation store of this version, or is damaged."""
        try:
            attributes = json.loads(text).get("attributes", {}).get(ATTRIBUTE)
        except (ValueError, AttributeError) as error:
            raise StoreInvalid(f"{path}/{ROOT_KEY} is not the JSON of a Zarr group: {error}.") from error
        if attributes is None:
            raise StoreInvalid(f"{path} holds another Zarr hierarchy. Choose another store.path.")
        try:
            if attributes["version"] != FORMAT_VERSION:
                found = attributes["version"]
                raise StoreInvalid(f"the store {path} has format version {found}; this program reads {FORMAT_VERSION}.")
            metadata = StoreMetadata(**{f.name: attributes[f.name] for f in fields(StoreMetadata)})
            blocks = attributes.get("blocks")
            root = cls(
                metadata,
                tuple(attributes["arrays"]),
                attributes["created"],
                attributes["complete"],
                None if blocks is None else tuple(blocks),
                attributes.get("weights_error"),
                attributes.get("commits_sha256"),
            )
            fingerprint = attributes["fingerprint"]
        except (KeyError, TypeError, AttributeError) as error:
            raise StoreInvalid(f"{path}/{ROOT_KEY} is damaged: {type(error).__name__} {error}.") from error
        if fingerprint != metadata.fingerprint():
            raise StoreInvalid(f"{path}/{ROOT_KEY} was edited: its fingerprint is not that of its content.")
        return root


def read_metadata(path: str) -> StoreMetadata | None:
    """The metadata of the store at `path`, or None where there is no store. Raises StoreError."""
    root = read_root(path, open_kvstore(path))
    return None if root is None else root.metadata


def read_root(path: str, kvstore: ts.KvStore) -> StoreRoot | None:
    """The root of the store, or None where there is none. Raises StoreError."""
    text = read_key(kvstore, ROOT_KEY)
    return None if text is None else StoreRoot.from_json(text, path)


def require_root(path: str, kvstore: ts.KvStore) -> StoreRoot:
    """The root of a store that is there. Raises StoreInvalid where it is not, or damaged, and StoreError."""

    def check(_key: str, text: bytes | None) -> StoreRoot:
        if text is None:
            raise StoreInvalid(f"there is no activation store at {path}: it has no {ROOT_KEY}.")
        return StoreRoot.from_json(text, path)

    [root] = read_checked(kvstore, [ROOT_KEY], check)
    return root


def stored_layout(root: StoreRoot, arrays: Mapping[str, ts.TensorStore]) -> StoreLayout:
    """The layout of a store, from its arrays as they are."""
    selected = arrays[SELECTED.name].shape[1] if root.metadata.selects else None
    slots = "position" if selected is None else SELECTED.slots
    specs = tuple(ArraySpec(name, arrays[name].dtype.name, arrays[name].shape[2], slots=slots) for name in root.arrays)
    scales = (scale_spec(spec, arrays[scale_name(spec.name)].shape[2]) for spec in specs if root.metadata.has_scales)
    return StoreLayout(
        num_streams=root.metadata.num_streams,
        rows_per_block=root.metadata.rows_per_block,
        length=arrays["tokens"].shape[1],
        arrays=specs,
        compression=root.metadata.store.get("compression", "none"),
        selected=selected,
        scales=tuple(scales),
    )


def store_exists(path: str) -> bool:
    """Whether there is a store at `path`, be it sound or not. Raises StoreError."""
    return read_key(open_kvstore(path), ROOT_KEY) is not None


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dicts, by dotted key. Lists are leaves."""
    if isinstance(value, dict) and (value or not prefix):
        for key, child in value.items():
            yield from _leaves(child, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value


def _software() -> dict[str, str]:
    found = {}
    for package in ("activation-pipeline", "tensorstore"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            found[package] = "unknown"
    return found
