"""Text for terminals, which data must not control."""

import re

# All control characters but tab and newline, and the marks that reorder text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with escapes such as \\x1b in place of control characters."""
    return _CONTROL.sub(lambda character: ascii(character[0])[1:-1], text)
