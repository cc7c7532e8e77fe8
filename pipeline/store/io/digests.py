"""The digest of plain values, which reveals an edited object."""

import hashlib
import json
from typing import Any


def json_digest(content: Any) -> str:
    """The sha256 of the canonical JSON of plain values, as hex."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
