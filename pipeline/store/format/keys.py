"""The kinds of a store's objects, and their keys. Objects with other keys at the same address are neither deleted nor
read."""

import re
from enum import Enum
from typing import NamedTuple

from pipeline.core.sites import ActivationKey
from pipeline.store.io.local_files import LOCK_SUFFIX

JOBS_PREFIX = "_jobs/"  # of what jobs keep beside the store's content, perhaps even after the store was deleted
MANIFEST_KEY = f"{JOBS_PREFIX}manifest.json"  # the input files; written again where it is missing
LEASES_PREFIX = f"{JOBS_PREFIX}lease-"

MAX_ENCODER_NAME = 100
ENCODER_NAME = rf"[A-Za-z0-9_-]{{1,{MAX_ENCODER_NAME}}}"  # an SAE's name, as it occurs in the names of its arrays

_BLOCK = r"stream-(?P<stream>\d{5,12})/block-(?P<number>\d{6,12})"
_GROUP = r"stream-(?P<stream>\d{5,12})/group-(?P<number>\d{6,12})"
_LOG = r"\d{8}T\d{6}Z-[^/]+-\d+\.jsonl"  # what a run measured
_TEMPORARY = re.compile(rf"(\.[0-9a-f]{{8}})?{re.escape(LOCK_SUFFIX)}$")  # ends the names of a killed process's files


class Kind(Enum):
    """A kind of objects. The value is a regular expression of their keys: `folder` is that of an array or of an index
    by feature, `number` that of a block or a group; `number` and `column` are a store shard's indices in its array."""

    shard = r"(?P<folder>[^/]+)/c\.(?P<number>\d{1,18})\.(?P<column>\d{1,9})(\.0)?"
    documents = rf"_documents/{_BLOCK}\.parquet"
    statistics = rf"_statistics/{_BLOCK}\.parquet"
    feature_index = rf"(?P<folder>_features/[^/]+)/{_BLOCK}\.csc"
    record = rf"_commits/{_BLOCK}\.json"
    array = r"(?P<folder>[^/]+)/zarr\.json"
    root = r"zarr\.json"
    summary = r"_summary/(blocks|statistics|ids)-[0-9a-f]{16}\.parquet"
    group = rf"_generated/{_GROUP}\.parquet"
    job = rf"_jobs/(lease-\d{{5,}}\.json|manifest\.json|{_LOG})"


_PATTERNS = {kind: re.compile(kind.value, re.ASCII) for kind in Kind}
FOLDERS = ("_commits", "_documents", "_statistics", "_features", "_summary", "_generated", "_jobs")
"""The folders of a store besides its arrays; that of the commit records comes first."""


class StoreKey(NamedTuple):
    """What a key says about its object; see `Kind`."""

    kind: Kind
    folder: str | None
    stream: int | None
    number: int | None
    column: int | None


def parse_key(key: str) -> StoreKey | None:
    """The object that a store may have at this key, or at the key of a temporary file for it; None if there is none."""
    key = _TEMPORARY.sub("", key)
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(key):
            groups = match.groupdict()
            numbers = (groups.get(name) and int(groups[name]) for name in ("stream", "number", "column"))
            return StoreKey(kind, groups.get("folder"), *numbers)
    return None


def stream_prefix(prefix: str, stream: int) -> str:
    """The prefix of a stream's keys below a prefix such as `_commits/`."""
    return f"{prefix}stream-{stream:05d}/"


def block_key(prefix: str, stream: int, block: int, suffix: str) -> str:
    """The key of one of a block's own objects, relative to the store."""
    return f"{stream_prefix(prefix, stream)}block-{block:06d}{suffix}"


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


def encoded_array(features: str) -> str | None:
    """The activation array that an SAE encodes, from a result of `features_name`. None for other names."""
    match = re.fullmatch(rf"features\.(blocks\.\d+\.\w+|\w+)(\.{ENCODER_NAME})?", features, re.ASCII)
    return match and match[1]


def index_prefix(features: str) -> str:
    """The prefix of the keys of an SAE's indexes by feature. `features`: a result of `features_name`."""
    return f"_features/{features.removeprefix('features.')}/"
