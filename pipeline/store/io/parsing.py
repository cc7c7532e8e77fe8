"""Parsing a store's JSON, which may have been edited: into plain values, whose types and bounds are then checked."""

import hashlib
import json
from collections.abc import Callable, Collection
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
class Each:
    """Objects of which each value has this schema."""

    schema: Any


@dataclass(frozen=True)
class Of:
    """Values for which `holds` is true."""

    holds: Callable[[Any], bool]
    name: str


def integers(least: int, most: int) -> Of:
    return Of(lambda value: type(value) is int and least <= value <= most, f"{least} to {most}")


def one_of(texts: Collection[str]) -> Of:
    return Of(lambda value: isinstance(value, str) and value in texts, f"one of {', '.join(sorted(texts))}")


_NAMES = {dict: "an object", str: "a string", bool: "true or false", float: "a number", int: "an integer"}


def mismatch(value: Any, schema: Any, key: str = "") -> str | None:
    """What is wrong with a JSON value; None if it has this schema.

    schema: a type; an Of or Each; [schema] for a list; (None, schema, ...) for null or one of several; or {key: schema}
    for an object, which may have more keys, and may lack those that are written `key?`.
    """
    match schema:
        case Of(holds, name):
            return None if holds(value) else f"{key!r} is {value!r:.80}, expected {name}"
        case Each(child) if isinstance(value, dict):
            parts = [(value[name], child, f"{key}.{name}") for name in value]
        case tuple():
            whats = [None if value is None else mismatch(value, option, key) for option in schema[1:]]
            return None if None in whats else whats[0]
        case dict() if isinstance(value, dict):
            children = {name.removesuffix("?"): child for name, child in schema.items()}
            if absent := [f"{key}.{name}".lstrip(".") for name in schema if name not in value and name in children]:
                return f"{absent[0]!r} is absent"
            parts = [
                (value[name], child, f"{key}.{name}".lstrip(".")) for name, child in children.items() if name in value
            ]
        case [child] if isinstance(value, list):
            parts = [(item, child, f"{key}[{number}]") for number, item in enumerate(value)]
        case type() if type(value) is schema or (schema is float and type(value) is int):
            return None
        case _:
            kind = "a list" if isinstance(schema, list) else _NAMES[schema if isinstance(schema, type) else dict]
            return f"{key!r} is {value!r:.80}, expected {kind}"
    return next(filter(None, (mismatch(*part) for part in parts)), None)
