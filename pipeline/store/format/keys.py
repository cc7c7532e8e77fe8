"""The keys of a store's own objects: nothing else at its place is ever deleted, or taken for an object of a store."""

import re
from collections.abc import Collection

from pipeline.core.sites import ActivationKey
from pipeline.store.format.int8 import scale_name
from pipeline.store.format.layout import ERROR_PARTS, FEATURE_PARTS, OUTPUT_NAMES, SELECTED, SIDE_ARRAYS

LOCK_SUFFIX = ".__lock"  # of the temporary file of a local object; a killed process leaves it behind

INDEX_PREFIX = "_features/"  # of the indexes by feature

IDS_PREFIX = "_ids/"  # of the indexes of streams' ids

MANIFEST_KEY = "_data/manifest.json"  # what footers of input files say; made again where it is missing

MAX_ENCODER_NAME = 100
ENCODER_NAME = rf"[A-Za-z0-9_-]{{1,{MAX_ENCODER_NAME}}}"  # of an SAE, as a part of its arrays' names

_RUN = r"\d{8}T\d{6}Z-[^/]+-\d+"
_WORKER_KEYS = (
    r"_claims/(stream-\d{5,}\.(json|done-(\d+|all))|completion\.json)",
    r"_claims_test/[^/]+-\d+-[0-9a-f]{8}",
    rf"_metrics/{_RUN}(\.jsonl|-generate\.json)",
    re.escape(MANIFEST_KEY),
)
_FIXED = (
    *_WORKER_KEYS,
    r"zarr\.json",
    r"_commits/(stream-\d{5,}/block-\d{6,}\.json|consolidated\.jsonl)",
    r"_blocks/(stream-\d{5,}|all)\.npy",
    r"(_documents|_stats)/stream-\d{5,}/block-\d{6,}\.parquet",
    r"_generated/stream-\d{5,}/group-\d{6,}\.parquet",
    rf"{IDS_PREFIX}stream-\d{{5,}}\.ids",
    r"stats/zarr\.json",
)


def is_worker_key(key: str) -> bool:
    """Whether a worker writes this key besides the store's content, and may do so when the store is deleted already."""
    return re.fullmatch("|".join(_WORKER_KEYS), key, re.ASCII) is not None


def is_activation_name(name: object) -> bool:
    """Whether an array of activations may have this name."""
    try:
        return isinstance(name, str) and ActivationKey.parse(name).name == name
    except ValueError:
        return False


def features_name(array: str, encoder: str = "") -> str:
    """What the names of the arrays begin with that hold the features of an array of activations. `encoder`: its name,
    where several encode the array."""
    return ".".join(["features", array, *([encoder] if encoder else [])])


def is_features_name(name: object) -> bool:
    """Whether the names of features' arrays may begin with this."""
    if not isinstance(name, str):
        return False
    return is_activation_name(array_of(name))


def array_of(features: str) -> str | None:
    """The array whose features these are: the inverse of `features_name`. None for other names."""
    match = re.fullmatch(rf"features\.(blocks\.\d+\.\w+|\w+)(\.{ENCODER_NAME})?", features, re.ASCII)
    return match and match[1]


def index_prefix(features: str) -> str:
    """What the keys of the blocks' indexes by feature begin with. `features`: as in `features_name`."""
    return f"{INDEX_PREFIX}{features.removeprefix('features.')}/"


def is_array_name(name: str) -> bool:
    """Whether an array of some store may have this name."""
    stem, _, part = name.rpartition(".")
    if part in (*FEATURE_PARTS, *ERROR_PARTS) and is_features_name(stem):
        return True
    sides = {*OUTPUT_NAMES, *(spec.name for spec in (*SIDE_ARRAYS, SELECTED))}
    return name in sides or is_activation_name(name) or is_activation_name(name.removesuffix(scale_name("")))


class StoreKeys:
    """The keys of a store with these arrays of activations and outputs. Raises ValueError for names that no array of
    activations has."""

    def __init__(self, activations: Collection[str], outputs: Collection[str] = ()) -> None:
        wrong = [name for name in activations if not is_activation_name(name)]
        if wrong:
            raise ValueError(f"{wrong!r} are not names of activations")
        sides = [*(spec.name for spec in (*SIDE_ARRAYS, SELECTED)), *outputs]
        arrays = "|".join(map(re.escape, [*sides, *activations, *map(scale_name, activations)]))
        of_activations = "|".join(map(re.escape, activations)) or "(?!)"
        features = [name.removesuffix(".index") for name in outputs if name.endswith(".index")]
        reconstructed = [array_of(name) for name in features]  # has statistics, even if it is not stored
        summarised = "|".join(map(re.escape, [*activations, *reconstructed, *features])) or "(?!)"
        indexed = "|".join(re.escape(index_prefix(name)[:-1]) for name in features) or "(?!)"
        patterns = (
            *_FIXED,
            rf"({arrays})/(zarr\.json|c/\d+/0(/0)?)",
            rf"stats/({summarised})/(zarr\.json|c/0/0)",
            rf"({indexed})/stream-\d{{5,}}/block-\d{{6,}}\.csc",
            rf"_generated/stream-\d{{5,}}/group-\d{{6,}}\.({of_activations})\.activations",
        )
        self._own = re.compile(f"({'|'.join(patterns)})({re.escape(LOCK_SUFFIX)})?", re.ASCII)
        self._folders = re.compile(
            rf"(_commits|_documents|_stats|_generated)(/stream-\d{{5,}})?|_blocks|_ids|_claims|_claims_test|_metrics|_data"
            rf"|({arrays})(/c(/\d+(/0)?)?)?|stats(/({summarised})(/c(/0)?)?)?"
            rf"|{INDEX_PREFIX[:-1]}|({indexed})(/stream-\d{{5,}})?",
            re.ASCII,
        )
        names = dict.fromkeys((*sides, *activations, *map(scale_name, activations)))
        others = (
            "_documents",
            "_stats",
            "stats",
            INDEX_PREFIX[:-1],
            "_blocks",
            IDS_PREFIX[:-1],
            "_metrics",
            "_claims",
            "_claims_test",
            "_generated",
            "_data",
        )
        self.prefixes = tuple(f"{name}/" for name in ("_commits", *names, *others))
        """The prefixes of all keys, that of the commit records first."""

    def is_own(self, key: str) -> bool:
        return self._own.fullmatch(key) is not None

    def is_own_folder(self, key: str) -> bool:
        """Whether this is a local folder (without a slash at its end) that a store makes."""
        return self._folders.fullmatch(key) is not None
