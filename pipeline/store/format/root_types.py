"""The types allowed in a store's root, so that an edited root causes an error message instead of a traceback."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.keys import is_activation_name, is_features_name
from pipeline.store.format.layout import ITEM_BYTES, OUTPUTS
from pipeline.store.format.target import ALL

MAX_STREAMS = 1 << 20  # each takes memory and time


class _Rule(NamedTuple):
    """What the value at a dotted key must be. Unless `required`, it may be absent, and also null if `null` is true."""

    key: str
    holds: Callable[[Any], bool]
    expected: str
    required: bool = False
    null: bool = True


def _is_count(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _are_errors(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(error, dict) for error in value.values()):
        return False
    return all(_is_number(number) for error in value.values() for number in error.values())


def _are_names(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _MAX_ARRAYS or not all(map(is_activation_name, value)):
        return False
    return len(value) == len(set(value))


def _are_encoders(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(sae, dict)
        and is_features_name(sae.get("features"))
        and _is_count(sae.get("top"), 1, MAX_WIDTH)
        and _is_count(sae.get("width"), 1, _MAX_FEATURES)
        and sae.get("dtype") in ("bfloat16", "float32")
        for sae in value
    )


def _are_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_count(count, 1, MAX_WIDTH) for count in value.values())


def _is_summary(value: Any) -> bool:
    if not isinstance(value, dict) or not {"blocks", "statistics", "ids"} <= value.keys():
        return False
    digests = {key: digest for key, digest in value.items() if key != "ids_bytes"}
    is_valid = all(_is_sha256(digest) or (digest is None and key != "blocks") for key, digest in digests.items())
    return is_valid and (value["ids"] is None or _is_count(value.get("ids_bytes"), 1, _MAX_IDS_BYTES))


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _are_outputs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name in OUTPUTS for name in value)


_ABSENT = object()
MAX_LENGTH = 1 << 24  # positions of a row, and rows of a block
MAX_WIDTH = 1 << 24  # features of an activation
_MAX_FEATURES = 1 << 26  # of an SAE; verifying a store takes memory for each
_MAX_ARRAYS = 1 << 16
_MAX_IDS_BYTES = 1 << 40
_DTYPES = ", ".join(ITEM_BYTES)
_OBJECTS = ("model", "tokenizer", "data", "batch", "capture", "store")
_CONFIGS = ("run", "model", "data", "capture", "batch", "store")
_RULES = (
    *(_Rule(key, lambda v: isinstance(v, dict), "an object", required=True) for key in (*_OBJECTS, "config")),
    *(
        _Rule(key, lambda v: isinstance(v, dict), "an object", null=False)
        for key in ("config", *(f"config.{k}" for k in _CONFIGS))
    ),
    _Rule("num_streams", lambda v: _is_count(v, 1, MAX_STREAMS), f"1 to {MAX_STREAMS}", required=True),
    _Rule("rows_per_block", lambda v: _is_count(v, 1, MAX_LENGTH), f"1 to {MAX_LENGTH}", required=True),
    *(_Rule(key, _are_counts, f"1 to {MAX_WIDTH} by array", required=True) for key in ("widths", "scale_groups")),
    _Rule(
        "hook_names",
        lambda v: isinstance(v, dict) and all(isinstance(name, str) for name in v.values()),
        "names by array",
        required=True,
    ),
    _Rule("selected", lambda v: v is None or _is_count(v, 1, MAX_LENGTH), f"null or 1 to {MAX_LENGTH}", required=True),
    _Rule("arrays", _are_names, "a list of distinct activation names", required=True),
    _Rule("complete", lambda v: isinstance(v, bool), "true or false", required=True),
    _Rule("created", lambda v: isinstance(v, str), "a time", required=True),
    _Rule("fingerprint", lambda v: isinstance(v, str), "a sha256", required=True),
    _Rule("summary", lambda v: v is None or _is_summary(v), "null or the sha256 of files", required=True),
    _Rule("target", lambda v: v == ALL or _is_count(v, 0, 1 << 62), f"a number of tokens, or {ALL}", required=True),
    _Rule("may_be_not_finite", lambda v: isinstance(v, bool), "true or false", required=True),
    *(
        _Rule(key, lambda v: v is None or _are_errors(v), "null or objects of numbers by array", required=True)
        for key in ("weights_error", "cache_error")
    ),
    _Rule("batch.length", lambda v: _is_count(v, 1, MAX_LENGTH), f"1 to {MAX_LENGTH}", required=True),
    _Rule("capture.dtype", lambda v: isinstance(v, str) and v in ITEM_BYTES, f"one of {_DTYPES}", required=True),
    _Rule("capture.statistics", lambda v: isinstance(v, bool), "true or false", required=True),
    _Rule("capture.outputs", _are_outputs, f"names from {', '.join(OUTPUTS)}", null=False),
    _Rule("capture.encode", _are_encoders, "descriptions of SAEs", null=False),
    _Rule("capture.top_logprobs", lambda v: _is_count(v, 1, MAX_WIDTH), f"1 to {MAX_WIDTH}", null=False),
    _Rule("store.compression", lambda v: v in ("none", "zstd"), "none or zstd"),
    _Rule("config.run.max_tokens", lambda v: v is None or _is_count(v, 0, 1 << 62), "a count", required=True),
    *(
        _Rule(f"config.{key}", lambda v: isinstance(v, str), "a string")
        for key in ("model.path", "model.tokenizer", "data.path", "data.revision")
    ),
)


def require_root_types(attributes: Mapping[str, Any], subject: str) -> None:
    """Raises StoreInvalid for a wrong value, naming `subject`, the key, its value and what was expected."""
    for rule in _RULES:
        value = _value(attributes, rule.key)
        is_unset = not rule.required and (value is _ABSENT or (value is None and rule.null))
        if not is_unset and not rule.holds(value):
            shown = "absent" if value is _ABSENT else f"{value!r:.80}"
            raise StoreInvalid(f"{subject} is damaged: {rule.key!r} is {shown}, expected {rule.expected}.")


def _value(attributes: Mapping[str, Any], dotted: str) -> Any:
    value: Any = attributes
    for part in dotted.split("."):
        value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
    return value
