"""The first character of each token of a text.

The `tokenizers` library can count characters, but then takes about 1.3 times as long. So a text's tokens are joined: if
that gives the text, their lengths say where each begins.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32
from tokenizers import Encoding, Tokenizer

_PROBE = "a b\n <c>"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
# Byte-level tokens are written with a printable character for each byte (GPT-2's bytes_to_unicode).
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {byte: byte for byte in _PRINTABLE}  # by code point
_BYTE_OF |= {256 + n: byte for n, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}


class TokenStarts:
    """Finds the tokens' first characters by their bytes. joins: whether a tokenizer's tokens join to the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        components = filter(None, (tokenizer.normalizer, tokenizer.pre_tokenizer))
        is_byte_level = any(b'"ByteLevel"' in component.__getstate__() for component in components)
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._bytes = [b""] * (1 + max(vocabulary.values(), default=-1))
        for text, number in vocabulary.items():
            self._bytes[number] = text.encode() if text in added else _token_bytes(text, is_byte_level)
        self._sizes = np.fromiter(map(len, self._bytes), np.int32, len(self._bytes))
        ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
        self.joins = self.find(_PROBE, ids) is not None

    def find(self, text: str, ids: Sequence[int]) -> Int32[np.ndarray, "n 2"] | None:
        """Each token's id and first character; None if the tokens do not join to the text, as after a normaliser has
        changed it."""
        content = text.encode()
        if b"".join([self._bytes[i] for i in ids]) != content:
            return None
        found = np.empty((len(ids), 2), np.int32)
        found[:, 0] = ids
        sizes = self._sizes[found[:, 0]]
        starts = np.cumsum(sizes) - sizes
        if len(content) != len(text):
            is_first = (np.frombuffer(content, np.uint8) & 0xC0) != 0x80  # of a character's bytes
            starts = (np.cumsum(is_first) - 1)[np.minimum(starts, len(content) - 1)]
        found[:, 1] = starts
        return found


def offset_starts(encoding: Encoding) -> Int32[np.ndarray, "n 2"]:
    """Each token's id and first character, as the library counted it."""
    return np.array([encoding.ids, [first for first, _ in encoding.offsets]], np.int32).T.copy()


def _token_bytes(text: str, is_byte_level: bool) -> bytes:
    if is_byte_level:
        return text.translate(_BYTE_OF).encode("latin-1", "replace")
    if byte := _BYTE.fullmatch(text):
        return bytes([int(byte[1], 16)])
    return text.replace("\u2581", " ").encode()
