"""Parsing a store's JSON, which may have been edited."""

import json
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
    try:
        value = json.loads(text)
        if b"\\u" in text:  # half of a surrogate pair could be neither printed nor hashed
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise StoreInvalid(
            f"{subject} is JSON nested too deeply, expected at most {MAX_DEPTH} levels. {remedy}"
        ) from None
    except ValueError as error:  # UnicodeDecodeError and UnicodeEncodeError are ValueErrors
        raise StoreInvalid(f"{subject} is not JSON: {error}. {remedy}") from error
    if is_deep(text, value):
        raise StoreInvalid(f"{subject} is JSON nested too deeply, expected at most {MAX_DEPTH} levels. {remedy}")
    return value
