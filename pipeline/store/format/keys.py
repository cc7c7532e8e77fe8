"""The keys of a store's objects. Objects with other keys at the same address are neither deleted nor read."""

import re
from collections.abc import Collection, Iterable

from pipeline.core.sites import ActivationKey
from pipeline.store.format.layout import SELECTED, SIDE_ARRAYS
from pipeline.store.format.scaled import scale_name
from pipeline.store.io.storage import LOCK_SUFFIX

_TEMPORARY = rf"((\.[0-9a-f]{{8}})?{re.escape(LOCK_SUFFIX)})"  # ends the names of a killed process's temporary files

_INDEX_FOLDER = "_features"  # the indexes by feature

MANIFEST_KEY = "_data/manifest.json"  # the input files; written again where it is missing

MAX_ENCODER_NAME = 100
ENCODER_NAME = rf"[A-Za-z0-9_-]{{1,{MAX_ENCODER_NAME}}}"  # an SAE's name, as it occurs in the names of its arrays

_RUN = r"\d{8}T\d{6}Z-[^/]+-\d+"
_WORKER_KEYS = (
    r"_leases/stream-\d{5,}\.json",
    r"_probe/[^/]+-\d+-[0-9a-f]{8}",
    rf"_metrics/{_RUN}(\.jsonl|-generate\.json)",
    re.escape(MANIFEST_KEY),
)
_FIXED = (
    *_WORKER_KEYS,
    r"zarr\.json",
    r"_commits/stream-\d{5,}/block-\d{6,}\.json",
    r"(_documents|_statistics)/stream-\d{5,}/block-\d{6,}\.parquet",
    r"_generated/stream-\d{5,}/group-\d{6,}\.parquet",
    r"_summary/(blocks|statistics|ids)-[0-9a-f]{16}\.parquet",
)
_FOLDERS_OF_STREAMS = ("_commits", "_documents", "_statistics", "_generated")  # with a folder for each stream
_FLAT_FOLDERS = ("_summary", "_leases", "_probe", "_metrics", "_data")


def stream_prefix(prefix: str, stream: int) -> str:
    """The prefix of a stream's keys below a prefix such as `_commits/`."""
    return f"{prefix}stream-{stream:05d}/"


def block_key(prefix: str, stream: int, block: int, suffix: str) -> str:
    """The key of one of a block's own objects, relative to the store."""
    return f"{stream_prefix(prefix, stream)}block-{block:06d}{suffix}"


def is_worker_key(key: str) -> bool:
    """Whether workers write this key, or a temporary file for it, in addition to the store's content, perhaps even
    after the store was deleted."""
    return re.fullmatch(f"({'|'.join(_WORKER_KEYS)}){_TEMPORARY}?", key, re.ASCII) is not None


def is_activation_name(name: object) -> bool:
    """Whether this is a valid name of an activation array."""
    try:
        return isinstance(name, str) and ActivationKey.parse(name).name == name
    except ValueError:
        return False


def features_name(array: str, encoder: str = "") -> str:
    """The prefix of the names of an SAE's arrays. `array`: the activations that it encodes. `encoder`: the SAE's name,
    where several encode that array."""
    return ".".join(["features", array, *([encoder] if encoder else [])])


def is_features_name(name: object) -> bool:
    """Whether this is a valid prefix of the names of an SAE's arrays."""
    return isinstance(name, str) and is_activation_name(encoded_array(name))


def encoded_array(features: str) -> str | None:
    """The activation array that an SAE encodes, from a result of `features_name`. None for other names."""
    match = re.fullmatch(rf"features\.(blocks\.\d+\.\w+|\w+)(\.{ENCODER_NAME})?", features, re.ASCII)
    return match and match[1]


def index_prefix(features: str) -> str:
    """The prefix of the keys of an SAE's indexes by feature. `features`: a result of `features_name`."""
    return f"{_INDEX_FOLDER}/{features.removeprefix('features.')}/"


class StoreKeys:
    """The keys of a store with these arrays.

    activations: names of activation arrays; raises ValueError for an invalid one. outputs: names of the arrays of
    `capture.outputs` and of SAEs.
    """

    def __init__(self, activations: Collection[str], outputs: Collection[str] = ()) -> None:
        wrong = [name for name in activations if not is_activation_name(name)]
        if wrong:
            raise ValueError(f"{wrong!r} are not names of activation arrays")
        sides = (spec.name for spec in (*SIDE_ARRAYS, SELECTED))
        names = tuple(dict.fromkeys((*sides, *outputs, *activations, *map(scale_name, activations))))
        arrays = _any_of(names)
        indexed = _any_of(index_prefix(name.removesuffix(".index"))[:-1] for name in outputs if name.endswith(".index"))
        patterns = (
            *_FIXED,
            rf"({arrays})/(zarr\.json|c\.\d+\.0(\.0)?)",
            rf"({indexed})/stream-\d{{5,}}/block-\d{{6,}}\.csc",
            rf"_generated/stream-\d{{5,}}/group-\d{{6,}}\.({_any_of(activations)})\.[0-9a-f]{{16}}\.activations",
        )
        self._keys = re.compile(f"({'|'.join(patterns)}){_TEMPORARY}?", re.ASCII)
        flat = _any_of((*_FLAT_FOLDERS, _INDEX_FOLDER))
        self._folders = re.compile(
            rf"({_any_of(_FOLDERS_OF_STREAMS)}|{indexed})(/stream-\d{{5,}})?|{flat}|{arrays}", re.ASCII
        )
        folders = (*_FOLDERS_OF_STREAMS, *names, *_FLAT_FOLDERS, _INDEX_FOLDER)
        self.prefixes = tuple(f"{folder}/" for folder in folders)
        """The prefixes of all keys; that of the commit records comes first."""

    def is_own(self, key: str) -> bool:
        """Whether an object of the store may have this key."""
        return self._keys.fullmatch(key) is not None

    def is_own_folder(self, key: str) -> bool:
        """Whether this is a folder (without a trailing slash) of a store on a local disk."""
        return self._folders.fullmatch(key) is not None


def _any_of(names: Iterable[str]) -> str:
    """A regular expression for any of the names; it matches nothing if there are none."""
    return "|".join(map(re.escape, names)) or "(?!)"
