"""Tokenises long texts in pieces, so that memory is bounded. The ids are those of the whole text.

The `tokenizers` library takes 100 to 500 bytes per character of a text. A text is divided at positions from which on
the tokenizer gives the same ids with and without the text before. This is checked at every position, with the whole
piece before it and `_CONTEXT` characters after it. So the only assumption about normaliser, pre-tokenizer and model is
that they do not look further back or ahead.
"""

import re
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int32

PIECE_CHARACTERS = 1 << 19  # texts up to this length are tokenised as a whole
MAX_PIECE_CHARACTERS = 1 << 21  # the longest part of a text that cannot be divided: takes up to 0.8 GB of memory
_CONTEXT = 1 << 12
_SEARCHED = 1 << 13  # characters at a piece's end in which positions are tried
_TRIED = 4  # positions per pattern

# Positions at which tokenizers may divide a text, the most likely ones first.
_BOUNDARIES = [
    re.compile(pattern)
    for pattern in (
        r"(?<=[^\W\d_])(?= [^\W\d_])",  # a letter | a space and a letter
        r"(?<=[^\W\d_] )(?=[^\W\d_])",  # for tokenizers that add a space before every text
        r"(?<=\S)(?=\s)",
        r"(?<=\s)(?=\S)",
        r"(?<=\w)(?=\W)",
        r"(?<=\W)(?=\w)",
    )
]


Encode = Callable[[str], Int32[np.ndarray, "n columns"]]  # a text's ids and, as a second column, first characters


def encode_in_pieces(encode: Encode, text: str) -> Int32[np.ndarray, "n columns"]:
    """`encode(text)`, computed in pieces. `encode` must not add special tokens. Raises ValueError for a part that
    cannot be divided and is too long to be tokenised as a whole."""
    pieces: list[Int32[np.ndarray, "_ columns"]] = []
    start = 0
    while len(text) - start > PIECE_CHARACTERS + _CONTEXT:
        piece, end = _next_piece(encode, text, start)
        piece[:, 1:] += start
        pieces.append(piece)
        start = end
    pieces.append(encode(text[start:]))
    pieces[-1][:, 1:] += start
    return np.concatenate(pieces)


def _next_piece(encode: Encode, text: str, start: int) -> tuple[Int32[np.ndarray, "n columns"], int]:
    """The tokens from `start` to a position at which the text can be divided, and that position."""
    size = PIECE_CHARACTERS
    while size <= MAX_PIECE_CHARACTERS:
        end = start + size
        if end + _CONTEXT >= len(text):
            return encode(text[start:]), len(text)
        whole = encode(text[start : end + _CONTEXT])
        for position in _boundaries(text, end):
            rest = encode(text[position : end + _CONTEXT])
            if 0 < len(rest) < len(whole) and np.array_equal(whole[-len(rest) :, 0], rest[:, 0]):
                return whole[: -len(rest)], position
        size *= 2
    raise ValueError(
        f"the text has {MAX_PIECE_CHARACTERS} characters from character {start} on without a place where the tokenizer "
        "divides it: too many to tokenise them together. Divide the document"
    )


def _boundaries(text: str, end: int) -> Iterator[int]:
    """Positions before `end` to try, the last match of each pattern first."""
    begin = end - _SEARCHED
    window = text[begin - 2 : end + 2]
    for pattern in _BOUNDARIES:
        positions = [match.start() + begin - 2 for match in pattern.finditer(window)]
        yield from (position for position in positions[: -_TRIED - 1 : -1] if begin <= position <= end)
