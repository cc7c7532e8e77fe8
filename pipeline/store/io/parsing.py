"""Parsing a store's JSON, which may have been edited: into plain values, whose types and bounds are then checked."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import StoreInvalid
from pipeline.core.json_text import MAX_DEPTH, is_deep
from pipeline.store.io.failures import DAMAGE_REMEDY

_DENSE_BYTES, _LEAST_ITEM_BYTES = 1 << 20, 8  # in a larger text, items take as many bytes on average


def parse_store_json(text: bytes, subject: str, remedy: str = DAMAGE_REMEDY) -> Any:
    """The value of a JSON text. Raises StoreInvalid, naming `subject`, if it is not JSON, is nested deeper than
    MAX_DEPTH, or has a string that UTF-8 cannot encode. Also if it is large and has tiny items, which would take many
    times its size in memory."""
    if len(text) > _DENSE_BYTES and text.count(b",") * _LEAST_ITEM_BYTES > len(text):
        raise StoreInvalid(f"{subject} is JSON of {len(text):,} bytes with too many items. {remedy}")
    too_deep = f"{subject} is JSON nested too deeply, expected at most {MAX_DEPTH} levels. {remedy}"
    try:
        value = json.loads(text)
        if b"\\u" in text:  # half of a surrogate pair could be neither printed nor hashed
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise StoreInvalid(too_deep) from None
    except ValueError as error:  # UnicodeDecodeError and UnicodeEncodeError are ValueErrors
        raise StoreInvalid(f"{subject} is not JSON: {error}. {remedy}") from error
    if is_deep(text, value):
        raise StoreInvalid(too_deep)
    return value


def json_digest(content: Any) -> str:
    """The sha256 of the canonical JSON of plain values, as hex, which reveals an edited object."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Range:
    """Integers from `least` to `most`."""

    least: int
    most: int


@dataclass(frozen=True)
class Each:
    """Objects of which each value has this schema."""

    schema: Any


@dataclass(frozen=True)
class Of:
    """Values for which `holds` is true."""

    holds: Callable[[Any], bool]
    name: str


_NAMES = {dict: "an object", str: "a string", bool: "true or false", float: "a number", int: "an integer"}


def mismatch(value: Any, schema: Any, key: str = "") -> str | None:
    """What is wrong with a JSON value; None if it has this schema.

    schema: a type; a Range, Each or Of; None; a set of possible values; [schema] for a list; (schema, ...) for one of
    several; or {key: schema} for an object, which may have more keys, and may lack those that are written `key?`.
    """
    match schema:
        case dict() if isinstance(value, dict):
            for name, child in schema.items():
                if (plain := name.removesuffix("?")) in value or plain == name:
                    path = f"{key}.{plain}".lstrip(".")
                    if plain not in value:
                        return f"{path!r} is absent"
                    if what := mismatch(value[plain], child, path):
                        return what
            return None
        case Each(child) if isinstance(value, dict):
            return next(filter(None, (mismatch(v, child, f"{key}.{name}") for name, v in value.items())), None)
        case Range(least, most):
            holds = type(value) is int and least <= value <= most
        case Of(holds_for, _):
            holds = holds_for(value)
        case [child] if isinstance(schema, list) and isinstance(value, list):
            return next(filter(None, (mismatch(v, child, f"{key}[{n}]") for n, v in enumerate(value))), None)
        case tuple():
            holds = any(mismatch(value, option) is None for option in schema)
        case set():
            holds = isinstance(value, str) and value in schema
        case type():
            holds = type(value) is schema or (schema is float and type(value) is int)
        case _:
            holds = schema is None and value is None
    return None if holds else f"{key!r} is {value!r:.80}, expected {_described(schema)}"


def _described(schema: Any) -> str:
    match schema:
        case Range(least, most):
            return f"{least} to {most}"
        case Of(_, name):
            return name
        case dict() | Each():
            return "an object"
        case list():
            return "a list"
        case tuple():
            return " or ".join(map(_described, schema))
        case set():
            return f"one of {', '.join(sorted(schema))}"
    return _NAMES.get(schema, "null")
