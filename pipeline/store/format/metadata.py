"""A store's own description, its fingerprint, and how two of them differ.

It stands in the root zarr.json, under attributes["activation_store"].
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from pipeline.core.errors import StoreError, StoreInvalid, StoreMismatch
from pipeline.store.format.int8 import DTYPE as INT8
from pipeline.store.format.int8 import scale_name
from pipeline.store.format.keys import array_of
from pipeline.store.format.layout import SELECTED, SIDE_ARRAYS, TOKENS, ArraySpec, feature_specs, output_specs
from pipeline.store.format.root_types import require_root_types
from pipeline.store.format.target import Target
from pipeline.store.io.digests import json_digest
from pipeline.store.io.parsing import parse_store_json
from pipeline.store.io.storage import Storage, StorageLike

FORMAT_VERSION = 1
ATTRIBUTE = "activation_store"
ROOT_KEY = "zarr.json"

_ATTEMPTS = 100  # to change a root that other processes change at the same time

Json = Mapping[str, Any]


class _RootMissing(StoreInvalid):
    """A store has other objects, but no root."""


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

    @property
    def outputs(self) -> tuple[ArraySpec, ...]:
        """The arrays of what the model's head says of each token, and of what SAEs make of its activations."""
        slots = SELECTED.slots if self.selects else TOKENS.slots
        of_head = output_specs(self.capture.get("outputs", ()), self.capture.get("top_logprobs", 0), slots)
        reconstructed = self.reconstructed
        of_saes = (
            feature_specs(sae["features"], sae["top"], sae["dtype"], slots, reconstructed.get(sae["features"]))
            for sae in self.encoders
        )
        return (*of_head, *(spec for specs in of_saes for spec in specs))

    @property
    def encoders(self) -> tuple[Json, ...]:
        """The SAEs that encoded activations, in order; `features` is what the names of their arrays begin with."""
        return tuple(self.capture.get("encode", ()))

    @property
    def reconstructed(self) -> dict[str, str]:
        """By what the names of its arrays begin with, the array that an SAE reconstructs, where that is measured."""
        return {sae["features"]: array_of(sae["features"]) for sae in self.encoders if sae.get("error") is True}

    @property
    def indexed_features(self) -> tuple[str, ...]:
        """What the names of the arrays begin with whose blocks have an index by feature; none in stores of earlier
        programs."""
        return tuple(sae["features"] for sae in self.encoders) if self.capture.get("encode_index") is True else ()

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
                f"the store {path} was made with a different configuration:{lines}\n"
                "Give it the configuration, model and data of this store, or choose another store.path. A store "
                "without blocks can be deleted: python -m pipeline.delete."
            )


@dataclass(frozen=True)
class StoreRoot:
    """The content of the root zarr.json.

    arrays: names of the activation arrays.
    created: UTC, ISO 8601; the only value that differs between two runs of one configuration.
    complete: no block is missing.
    target: how many tokens the store is to hold; it only grows.
    blocks, blocks_sha256, statistics_digests: of a complete store, the number of blocks of each stream, the sha256 of
    the block table, and by array the digest of the merged statistics.
    commits_sha256: of a store that an earlier program completed, the sha256 of the consolidated records.
    array_digests: by array, of its zarr.json.
    may_be_not_finite: a run was told to store activations that are not finite.
    weights_error: of a model with int8 weights, by array name, the relative error that they cause.
    cache_error: of data=generate with int8 keys and values, by array name and of final_norm, the one that these cause.

    Stores of earlier programs have neither target nor digests.
    """

    metadata: StoreMetadata
    arrays: tuple[str, ...]
    created: str
    complete: bool = False
    target: Target | None = None
    blocks: tuple[int, ...] | None = None
    blocks_sha256: str | None = None
    commits_sha256: str | None = None
    statistics_digests: Mapping[str, str] | None = None
    array_digests: Mapping[str, str] | None = None
    may_be_not_finite: bool = False
    weights_error: Json | None = None
    cache_error: Json | None = None

    @property
    def allows_not_finite(self) -> bool:
        """Whether a run was told so: the one that created the store, as its configuration says, or a later one."""
        capture = self.metadata.config.get("capture")
        was_created_so = isinstance(capture, dict) and capture.get("on_not_finite") == "warn"
        return self.may_be_not_finite or was_created_so

    @property
    def array_names(self) -> tuple[str, ...]:
        """The names of all arrays, the side arrays first."""
        sides = (*SIDE_ARRAYS, SELECTED) if self.metadata.selects else SIDE_ARRAYS
        scales = map(scale_name, self.arrays) if self.metadata.has_scales else ()
        outputs = (spec.name for spec in self.metadata.outputs)
        return (*(spec.name for spec in sides), *self.arrays, *scales, *outputs)

    def unfinished(self) -> "StoreRoot":
        """The root of the same store while blocks may be missing."""
        return replace(
            self, complete=False, blocks=None, blocks_sha256=None, commits_sha256=None, statistics_digests=None
        )

    def to_json(self) -> bytes:
        """With a checksum of the attributes, so that an edited root is noticed."""
        optional = {
            "target": self.target,
            "blocks": None if self.blocks is None else list(self.blocks),
            "blocks_sha256": self.blocks_sha256,
            "commits_sha256": self.commits_sha256,
            "statistics_digests": self.statistics_digests,
            "array_digests": self.array_digests,
            "may_be_not_finite": self.may_be_not_finite or None,
            "weights_error": self.weights_error,
            "cache_error": self.cache_error,
        }
        attributes = {
            "version": FORMAT_VERSION,
            "complete": self.complete,
            "arrays": list(self.arrays),
            **{name: value for name, value in optional.items() if value is not None},
            **{f.name: getattr(self.metadata, f.name) for f in fields(self.metadata)},
            "fingerprint": self.metadata.fingerprint(),
            "created": self.created,
            "software": _software(),
        }
        attributes["sha256"] = json_digest(attributes)
        group = {"zarr_format": 3, "node_type": "group", "attributes": {ATTRIBUTE: attributes}}
        return (json.dumps(group, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes, path: str) -> "StoreRoot":
        """Raises StoreInvalid when the group at `path` is not an activation store of this version, or is damaged."""
        subject = f"{path}/{ROOT_KEY}"
        group = parse_store_json(text, subject)
        if not isinstance(group, dict) or not isinstance(group.get("attributes", {}), dict):
            raise StoreInvalid(f"{subject} is not the JSON of a Zarr group.")
        attributes = group.get("attributes", {}).get(ATTRIBUTE)
        if attributes is None:
            raise StoreInvalid(f"{path} holds another Zarr hierarchy. Choose another store.path.")
        if not isinstance(attributes, dict):
            raise StoreInvalid(f"{subject} is damaged: {ATTRIBUTE} is {attributes!r:.80}, expected an object.")
        if attributes.get("version") != FORMAT_VERSION:
            version = attributes.get("version")
            raise StoreInvalid(f"the store {path} has format version {version}; this program reads {FORMAT_VERSION}.")
        digest = attributes.pop("sha256", None)  # stores of earlier programs have none
        if digest is not None and digest != json_digest(attributes):
            raise StoreInvalid(f"{subject} does not match its own checksum: it was edited or damaged.")
        require_root_types(attributes, subject)
        metadata = StoreMetadata(**{f.name: attributes[f.name] for f in fields(StoreMetadata)})
        if attributes["fingerprint"] != metadata.fingerprint():
            raise StoreInvalid(f"{subject} was edited: its fingerprint is not that of its content.")
        arrays, blocks = tuple(attributes["arrays"]), attributes.get("blocks")
        captured = metadata.capture.get("arrays")
        if captured is not None and list(arrays) != captured:
            raise StoreInvalid(f"{subject} was edited: arrays are {list(arrays)}, but capture.arrays {captured}.")
        return cls(
            metadata,
            arrays,
            created=attributes["created"],
            complete=attributes["complete"],
            target=attributes.get("target"),
            blocks=None if blocks is None else tuple(blocks),
            blocks_sha256=attributes.get("blocks_sha256"),
            commits_sha256=attributes.get("commits_sha256"),
            statistics_digests=attributes.get("statistics_digests"),
            array_digests=attributes.get("array_digests"),
            may_be_not_finite=attributes.get("may_be_not_finite", False),
            weights_error=attributes.get("weights_error"),
            cache_error=attributes.get("cache_error"),
        )


def read_metadata(place: StorageLike) -> StoreMetadata | None:
    """The metadata of the store at `place`, or None where there is no store. Raises StoreError.

    Where there is an array without a root, the root is read again, a few times: a service may answer once that it is
    missing. A merge that was interrupted leaves arrays and no root.
    """
    storage = Storage.open(place)

    def read() -> StoreRoot | None:
        root = read_root(storage)
        if root is None and storage.read(f"{TOKENS.name}/zarr.json") is not None:
            raise _RootMissing(f"{storage.path} has arrays, but no {ROOT_KEY}.")
        return root

    try:
        root = storage.retry_read(read)
    except _RootMissing:
        return None
    return None if root is None else root.metadata


def read_root(storage: Storage) -> StoreRoot | None:
    """The root of the store, or None where there is none. Raises StoreError."""
    return read_root_generation(storage)[0]


def read_root_generation(storage: Storage) -> tuple[StoreRoot | None, bytes]:
    """The root of the store, or None where there is none, and the object's generation. Raises StoreError."""

    def read() -> tuple[StoreRoot | None, bytes]:
        [(text, generation)] = storage.read_with_generations([ROOT_KEY])
        return None if text is None else StoreRoot.from_json(text, storage.path), generation

    return storage.retry_read(read)


def change_root(storage: Storage, change: Callable[[StoreRoot], StoreRoot]) -> StoreRoot:
    """Replaces the root by what `change` makes of it, whatever others do at the same time, and returns it.

    Raises StoreError.
    """
    for _ in range(_ATTEMPTS):
        root, generation = read_root_generation(storage)
        if root is None:
            raise StoreError(f"{storage.path}/{ROOT_KEY} was deleted while the store was being written.")
        changed = change(root)
        if changed == root or storage.write_if_unchanged(ROOT_KEY, changed.to_json(), generation) is not None:
            return changed
    raise StoreError(
        f"{storage.path}/{ROOT_KEY} could not be changed: other processes did so {_ATTEMPTS} times. Try again."
    )


def require_root(storage: Storage) -> StoreRoot:
    """The root of a store. Raises StoreInvalid where it is missing or damaged, and StoreError."""

    def check(_key: str, text: bytes | None) -> StoreRoot:
        if text is None:
            raise StoreInvalid(f"there is no activation store at {storage.path}: it has no {ROOT_KEY}.")
        return StoreRoot.from_json(text, storage.path)

    [root] = storage.read_checked([ROOT_KEY], check)
    return root


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dicts, by dotted key. Lists are leaves."""
    if isinstance(value, dict) and (value or not prefix):
        for key, child in value.items():
            yield from _leaves(child, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value


def _software() -> dict[str, str]:
    versions = {}
    for package in ("activation-pipeline", "tensorstore"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            versions[package] = "unknown"
    return versions
