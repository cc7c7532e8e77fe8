"""JSON from files that anybody may have written: checkpoints, tokenizers and stores."""

import json
from typing import Any

MAX_JSON_BYTES = 8 << 20  # parsing takes up to 30 times as much memory; 1,000 tensors take 0.1 MB
MAX_DEPTH = 64  # code that walks a value by recursion could exceed Python's limit beyond this


def parse_json(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for text that is not JSON, too large, or nested too deeply."""
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"{len(text):,} bytes, expected at most {MAX_JSON_BYTES:,}")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested too deeply, expected at most {MAX_DEPTH} levels") from None
    if is_deep(text, value):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return value


def is_deep(text: bytes, value: Any) -> bool:
    """Whether `value`, parsed from the JSON `text`, is nested deeper than MAX_DEPTH."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        lists = [child for parent in level if isinstance(parent, list) for child in parent]
        level = lists + [child for parent in level if isinstance(parent, dict) for child in parent.values()]
    return any(isinstance(value, list | dict) for value in level)
