"""Long texts, tokenised in pieces so that memory stays bounded; the ids are those of the whole text.

The `tokenizers` library takes some 100 to 500 bytes for every character of a text. A text is divided where the
tokenizer itself divides it: at a place from which on it gives the same ids whether or not it sees what stands before.
That is checked at every place with `_CONTEXT` characters behind it and the whole piece before it, so no assumption is
made about normaliser, pre-tokenizer or model but that none looks further ahead or back than this.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Int32

PIECE_CHARACTERS = 1 << 19  # texts that are no longer are tokenised whole
MAX_PIECE_CHARACTERS = 1 << 21  # of a stretch of text that cannot be divided: up to 0.8 GB of memory
_CONTEXT = 1 << 12
_SEARCHED = 1 << 13  # characters at a piece's end in which a place is looked for
_TRIED = 4  # places of each kind

# Where tokenizers may divide a text, the most likely first.
_PLACES = [
    re.compile(pattern)
    for pattern in (
        r"(?<=[^\W\d_])(?= [^\W\d_])",  # a letter | a space and a letter
        r"(?<=[^\W\d_] )(?=[^\W\d_])",  # for tokenizers that put a space before every text
        r"(?<=\S)(?=\s)",
        r"(?<=\s)(?=\S)",
        r"(?<=\w)(?=\W)",
        r"(?<=\W)(?=\w)",
    )
]


class IndivisibleText(ValueError):
    """A stretch of text that is too long to be tokenised whole."""


def encode_in_pieces(encode: Callable[[str], Sequence[int]], text: str) -> Int32[np.ndarray, "_"]:
    """`encode(text)`, where `encode` adds no special tokens. Raises IndivisibleText."""
    pieces: list[Int32[np.ndarray, _]] = []
    start = 0
    while len(text) - start > PIECE_CHARACTERS + _CONTEXT:
        piece, start = _next_piece(encode, text, start)
        pieces.append(piece)
    pieces.append(np.array(encode(text[start:]), np.int32))
    return np.concatenate(pieces)


def _next_piece(encode: Callable[[str], Sequence[int]], text: str, start: int) -> tuple[Int32[np.ndarray, "_"], int]:
    """The ids from `start` to a place where the text can be divided, and that place."""
    size = PIECE_CHARACTERS
    while size <= MAX_PIECE_CHARACTERS:
        end = start + size
        if end + _CONTEXT >= len(text):
            return np.array(encode(text[start:]), np.int32), len(text)
        whole = np.array(encode(text[start : end + _CONTEXT]), np.int32)
        for place in _places(text, end):
            rest = np.array(encode(text[place : end + _CONTEXT]), np.int32)
            if 0 < len(rest) < len(whole) and np.array_equal(whole[-len(rest) :], rest):
                return whole[: -len(rest)], place
        size *= 2
    raise IndivisibleText(
        f"the text has {MAX_PIECE_CHARACTERS} characters from character {start} on without a place where the tokenizer "
        "divides it: too many to tokenise them together. Divide the document"
    )


def _places(text: str, end: int) -> Iterator[int]:
    """Places before `end` that are worth a try, the last of each kind first."""
    begin = end - _SEARCHED
    window = text[begin - 2 : end + 2]
    for pattern in _PLACES:
        places = [match.start() + begin - 2 for match in pattern.finditer(window)]
        yield from (place for place in places[: -_TRIED - 1 : -1] if begin <= place <= end)
