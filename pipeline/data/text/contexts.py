"""The tokens that windows and rows repeat or add: `batch.windows=restart` and `batch.packing=concat`.

SAEs are trained on contexts of a fixed length, which all begin with the same token. Functions here return places: where
each token of a window or row comes from, so that whatever a document has for each of its tokens can follow them. A
place from n on, for a document of n tokens, is that of an added token: see `Added.take`.

Shapes: n tokens of a document, m tokens with those that are repeated or added, T = length tokens per window or row.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64

from pipeline.config.choices import Packing, Windows
from pipeline.config.schema import BatchConfig
from pipeline.core.errors import ConfigError
from pipeline.data.text.tokenizer import TextTokenizer

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Added:
    """The tokens that begin and end every window like a document, and separate the documents of a row.

    before: with concat, of every row. after: not with concat. separator: with concat only; at most one token. None: the
    documents have the tokens that the tokenizer puts before and after each. is_of_windows: whether every document has
    to begin with `before`, since its windows do.
    """

    before: Ids = ()
    after: Ids = ()
    separator: Ids | None = None
    is_of_windows: bool = False

    def problem(self, tokens: Int32[np.ndarray, " n"]) -> str | None:
        """Why token ids from outside cannot be a document; None if they can."""
        if not self.is_of_windows or _has(tokens[: len(self.before)], self.before):
            return None
        return (
            f"its token ids begin with {tokens[: len(self.before)].tolist()}, not with {[*self.before]}, so "
            "batch.windows=restart has nothing to repeat. Set batch.windows=continued"
        )

    def take(self, tokens: Int32[np.ndarray, " n"], places: Int64[np.ndarray, " m"]) -> Int32[np.ndarray, " m"]:
        """The tokens at `places`: of the document, and from n on, of `before`, `after` and `separator`."""
        added = [*self.before, *self.after, *(self.separator or ())]
        return np.append(tokens, np.array(added, np.int32))[places]


NOTHING = Added()


def open_added(batch: BatchConfig, tokenizer: TextTokenizer | None) -> Added:
    """The tokens that a configuration adds. tokenizer: None if it adds none. Raises ConfigError if `windows=restart`
    has none, or too many for `batch.length`."""
    if tokenizer is None and (batch.separator or batch.windows is Windows.restart):
        raise ConfigError(
            "batch.windows=restart and batch.separator need a tokenizer, and the model has none. Set model.tokenizer."
        )
    separator, is_joined = None, batch.packing is Packing.concat
    if is_joined and batch.separator is None and tokenizer is not None and not any(map(len, tokenizer.ends)):
        raise ConfigError(
            f"batch.packing=concat, but nothing separates documents: tokenizer {tokenizer.name} adds no token to them. "
            "Set batch.separator to a token's text, or to '' to join them directly."
        )
    if batch.separator is not None:
        separator = (tokenizer.token_id("batch.separator", batch.separator),) if batch.separator else ()
    if batch.windows is not Windows.restart:
        return Added(separator=separator)
    before, after = (tuple(ids.tolist()) for ids in tokenizer.ends)
    after = () if is_joined else after
    num_added = len(before) + len(after)
    if not num_added:
        raise ConfigError(
            f"batch.windows=restart, but tokenizer {tokenizer.name} puts no token before a document. Set data.prefix "
            "to one, such as '<|endoftext|>', or set batch.windows=continued."
        )
    if batch.length <= num_added:
        raise ConfigError(
            f"batch.length is {batch.length}, but batch.windows=restart repeats {num_added} tokens in each window. Set "
            "batch.length to more than that."
        )
    return Added(before, after, separator, is_of_windows=not is_joined)


def restarted(tokens: Int32[np.ndarray, " n"], length: int, added: Added) -> Int64[np.ndarray, " m"]:
    """The places of a document's windows. If it is longer than one, each begins and ends with the tokens with which the
    document does, of those in `added`. All windows but the last have `length` tokens."""
    n, begin, end = len(tokens), len(added.before), len(added.after)
    begin = begin if _has(tokens[:begin], added.before) else 0
    end = end if _has(tokens[n - end :], added.after) else 0
    if n <= length or not begin + end:
        return np.arange(n)
    before, after = n + np.arange(begin), n + len(added.before) + np.arange(end)
    parts, start = [np.arange(begin)], begin
    while True:
        opening = _missing(before, added.before[:begin], tokens[start : n - end]) if start > begin else parts.pop()
        stop = min(start + length - len(opening) - end, n - end)
        parts += [opening, np.arange(start, stop), after]
        if stop == n - end:
            return np.concatenate([*parts[:-1], np.arange(stop, n)])
        start = stop


def joined(tokens: Int32[np.ndarray, " n"], length: int, column: int, added: Added) -> Int64[np.ndarray, " m"]:
    """The places of a document's tokens in rows of several documents, of which the first has `column` tokens before it.

    As SAELens's `concat_and_batch_sequences`: the separator comes before every document that does not begin a row, and
    `added.before` begins every row. Neither is put beside itself. A row may end with a separator.
    """
    n, parts, start, room = len(tokens), [], 0, length - column
    before = np.arange(n, n + len(added.before))
    if column and added.separator and not _has(tokens[:1], added.separator):
        parts.append(np.array([n + len(before)]))
        room -= 1
    while start < n:
        if room == length:
            opening = _missing(before, added.before, tokens[start:])
            parts.append(opening)
            room -= len(opening)
        stop = min(start + room, n)
        parts.append(np.arange(start, stop))
        start, room = stop, length
    return np.concatenate(parts)


def _missing(places: Int64[np.ndarray, " b"], before: Ids, following: Ids) -> Int64[np.ndarray, " c"]:
    """The places of `before` without the last ones whose tokens begin the text that follows."""
    sizes = range(min(len(before), len(following)), 0, -1)
    size = next((size for size in sizes if _has(following[:size], before[-size:])), 0)
    return places[: len(places) - size]


def _has(tokens: Int32[np.ndarray, "_"], ids: Ids) -> bool:
    return tuple(tokens.tolist()) == ids
