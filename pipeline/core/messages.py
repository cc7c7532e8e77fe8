"""Parts of messages: values, counts, suggestions, and text that does not control a terminal."""

import difflib
import re
import reprlib
from collections.abc import Collection

# All control characters but tab and newline, and the marks that reorder text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200


def shown(value: object) -> str:
    """`repr`, shortened: a value may have thousands of digits, or a `repr` of its own that fails."""
    try:
        return _short.repr(value)
    except ValueError:  # of a whole number, from 4,300 digits on
        return f"a {type(value).__name__} that is too long to show"


def shortened(text: str, max_characters: int) -> str:
    """The text, or if it is longer, its beginning and its length."""
    return text if len(text) <= max_characters else f"{text[:max_characters]}... ({len(text):,} characters)"


def counted(number: int, noun: str) -> str:
    """ "1 block", "2,000 blocks": the noun is in the plural, formed with -s, unless the number is 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def did_you_mean(name: str, names: Collection[str], *, cutoff: float = 0.6, ending: str = "") -> str:
    """A question for the end of a message, after a blank: the name most similar to `name`, and `ending`. Empty where no
    name has a similarity (difflib's, 0 to 1) of `cutoff`."""
    similar = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" Did you mean {similar[0]}{ending}?" if similar else ""


def printable(text: str) -> str:
    """The text with escapes such as \\x1b in place of control characters."""
    return _CONTROL.sub(lambda character: ascii(character[0])[1:-1], text)
