"""`capture.positions`: which tokens' activations are stored. Pure functions of documents and settings.

A selection is made for each piece (a window of a document) before packing, so it does not depend on the packing or on
other documents.

Shapes: n tokens of a piece, m selected tokens among them, P pieces, R rows, T = length positions per row, K = slots per
row for selected tokens.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int16, Int32, Int64, Shaped

from pipeline.config.choices import Positions
from pipeline.config.schema import BatchConfig, CaptureConfig
from pipeline.core.errors import ConfigError
from pipeline.data.packing import Placement
from pipeline.data.text.labels import LAST, WORDS, chosen
from pipeline.data.text.tokenizer import TextTokenizer

_TOKENS_PER_SLOT = 16  # default for capture.per_row: with shorter documents, slots run out before a row is full
_SIGMAS = 4  # slots for sampled tokens exceed their mean number per row by as many standard deviations

NEEDS_LABELS = (
    "capture.positions=labels needs conversations, whose tokens have labels: data=hf with data.messages, or chats."
)

# The settings of each choice of capture.positions. `seed` and `per_row` are optional.
_SETTINGS = {
    Positions.all: (),
    Positions.last: ("per_row",),
    Positions.every: ("every",),
    Positions.token: ("token", "per_row"),
    Positions.regex: ("regex", "per_row"),
    Positions.labels: ("labels", "per_row"),
    Positions.sample: ("rate", "seed"),
}
_OPTIONAL = {"per_row", "seed"}


class Chosen(NamedTuple):
    """The selected tokens of a piece: their indices in it, ascending, and their ranks in case a row has too many."""

    places: Int64[np.ndarray, " m"]
    ranks: Shaped[np.ndarray, " m"]


@dataclass(frozen=True)
class Selection:
    """What `capture.positions` selects, in rows with K = `slots` slots.

    all: every token that is not another window's, if windows overlap.
    last: the last stored token of each document.
    every: positions k - 1, 2 k - 1, ... in each window of a document, or with joined documents in each row. A row has
        at most T // k of them.
    token, regex: the tokens with certain ids. is_selected: by token id; its last entry is False, and stands for all
        larger ids.
    labels: the tokens whose labels the words choose, see `label_words`.
    sample: each token with probability `rate`, depending on the seed, the document and the token's index. If a row has
        more than K of them, those with the smallest random numbers are stored, which are still a sample.
    overlap: the first tokens of a document's later windows, none of which is selected: those before a piece's own.
    """

    positions: Positions
    slots: int
    every: int | None = None
    is_selected: Bool[np.ndarray, " V"] | None = None
    rate: float | None = None
    seed: int = 0
    words: tuple[str, ...] = ()
    overlap: int = 0

    @property
    def packs(self) -> bool:
        """Whether rows are packed so that every selected token has a slot, if its piece has at most K."""
        return self.positions not in (Positions.all, Positions.every, Positions.sample)

    def labelled(self, labels: Int16[np.ndarray, "n 5"] | None) -> Bool[np.ndarray, " n"] | None:
        """Which of a document's tokens are selected by their labels; None with other positions. Raises ConfigError for
        a document without labels."""
        if self.positions is not Positions.labels:
            return None
        if labels is None:
            raise ConfigError(NEEDS_LABELS)
        return chosen(self.words, labels)

    def choose(
        self,
        tokens: Int32[np.ndarray, " n"],
        document: int,
        first: int,
        is_end: bool,
        is_labelled: Bool[np.ndarray, " n"] | None = None,
        column: int = 0,
    ) -> Chosen:
        """Selects among the tokens of a piece.

        document: the document's number. first: the piece's first token in the document. is_end: whether the piece ends
        with the document. is_labelled: the piece's part of `labelled`. column: the position of the piece's first token
        in its row if pieces are joined, or in its window if windows overlap.
        """
        match self.positions:
            case Positions.all:
                places = np.arange(len(tokens))
            case Positions.last:
                places = np.arange(len(tokens) - 1, len(tokens)) if is_end else np.arange(0)
            case Positions.every:
                places = np.arange((self.every - 1 - column) % self.every, len(tokens), self.every)
            case Positions.labels:
                places = np.flatnonzero(is_labelled)
            case Positions.sample:
                drawn = np.random.PCG64([self.seed, document]).advance(first).random_raw(len(tokens))
                places = np.flatnonzero(drawn < np.uint64(self.rate * 2**64))
                return Chosen(places, drawn[places])
            case _:
                places = np.flatnonzero(self.is_selected[np.minimum(tokens, len(self.is_selected) - 1)])
        return Chosen(places, places + column)


def slots_per_row(capture: CaptureConfig, batch: BatchConfig) -> int | None:
    """K, or None with positions=all unless windows overlap. Raises ConfigError for a missing setting, or one that
    exceeds the row length."""
    positions, length = capture.positions, batch.length
    needed = (name for name in _SETTINGS[positions] if name not in _OPTIONAL)
    if missing := next((name for name in needed if getattr(capture, name) in (None, [])), None):
        raise ConfigError(f"capture.positions={positions} needs capture.{missing}. Give it a value.")
    for name, least in (("every", 2), ("per_row", 1)):
        if (getattr(capture, name) or 0) > length:
            raise ConfigError(
                f"capture.{name} is {getattr(capture, name)}. Set it to {least} to {length} (at most the tokens of a "
                "row, batch.length)."
            )
    match positions:
        case Positions.all:
            return length if batch.overlap else None
        case Positions.every:
            return length // capture.every
        case Positions.sample:
            spread = _SIGMAS * math.sqrt(length * capture.rate * (1 - capture.rate))
            return min(length, math.ceil(length * capture.rate + spread))
    if capture.per_row is not None:
        return capture.per_row
    takes_all = positions is Positions.labels and not LAST.keys() & {*capture.labels}
    return length if takes_all else max(1, length // _TOKENS_PER_SLOT)


def selection_identity(capture: CaptureConfig, batch: BatchConfig) -> dict[str, str | int | float]:
    """What determines the selection, in addition to documents and tokenizer; {} if all tokens of rows are stored."""
    slots = slots_per_row(capture, batch)
    if slots is None:
        return {}
    given = {name: getattr(capture, name) for name in _SETTINGS[capture.positions]}
    defaults = {"per_row": slots, "seed": 0}
    return {"positions": str(capture.positions)} | {
        name: defaults.get(name) if value is None else value for name, value in given.items()
    }


def open_selection(capture: CaptureConfig, batch: BatchConfig, tokenizer: TextTokenizer | None) -> Selection | None:
    """The selection; None for all tokens of rows. Raises ConfigError, also if the tokenizer has no matching token."""
    slots = slots_per_row(capture, batch)
    if slots is None:
        return None
    is_selected = None
    if capture.positions in (Positions.token, Positions.regex):
        is_token = capture.positions is Positions.token
        ids = (
            [tokenizer.token_id("capture.token", capture.token)]
            if is_token
            else _matching_ids(capture.regex, tokenizer)
        )
        is_selected = np.zeros(max(ids) + 2, bool)
        is_selected[ids] = True
    words = tuple(capture.labels) if capture.positions is Positions.labels else ()
    if unknown := [word for word in words if word not in (*WORDS, *LAST)]:
        raise ConfigError(f"capture.labels contains {unknown[0]!r}. Set it to a list of {', '.join((*WORDS, *LAST))}.")
    settings = (capture.every, is_selected, capture.rate, capture.seed or 0, words)
    return Selection(capture.positions, slots, *settings, overlap=batch.overlap)


def _matching_ids(regex: str, tokenizer: TextTokenizer) -> list[int]:
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise ConfigError(
            f"capture.regex={regex!r} is not a regular expression: {error}. Correct it (Python's re)."
        ) from error
    ids = [token_id for token_id, text in tokenizer.token_texts().items() if pattern.search(text)]
    if not ids:
        raise ConfigError(
            f"capture.regex={regex!r} matches none of the {tokenizer.vocab_size} tokens. Set it to a regular "
            f"expression that matches part of a token's text, such as ' the'."
        )
    return ids


def costs(
    selection: Selection, sizes: Int64[np.ndarray, " P"], chosen: Sequence[Chosen], length: int
) -> tuple[Int64[np.ndarray, " P"], int]:
    """The cost of each piece, and the capacity of a row, in units such that a token costs K and a slot costs T.

    Pieces whose costs fit into a row have at most T tokens and K selected tokens together.
    """
    if not selection.packs:
        return sizes, length
    counts = np.array([min(len(piece_choice.places), selection.slots) for piece_choice in chosen], np.int64)
    return np.maximum(sizes * selection.slots, counts * length), length * selection.slots


def selected_slots(
    placement: Placement, chosen: Sequence[Chosen], num_slots: int
) -> tuple[Int32[np.ndarray, "R K"], Int64[np.ndarray, " P"]]:
    """The positions of the selected tokens in each row, ascending, and how many of each piece's tokens have a slot.

    If a row has more than `num_slots` selected tokens, those with the lowest ranks get a slot.
    """
    counts = np.array([len(piece_choice.places) for piece_choice in chosen], np.int64)
    none = np.empty(0, np.int64)
    piece = np.repeat(np.arange(len(chosen)), counts)
    position = placement.column[piece] + np.concatenate([none, *(piece_choice.places for piece_choice in chosen)])
    row, rank = placement.row[piece], np.concatenate([piece_choice.ranks for piece_choice in chosen] or [none])

    def index_in_row(row: np.ndarray) -> np.ndarray:
        """How many earlier entries have the same row, given ascending rows."""
        return np.arange(len(row)) - np.searchsorted(row, row)

    by_rank = np.lexsort((position, rank, row))
    kept = by_rank[index_in_row(row[by_rank]) < num_slots]
    kept = kept[np.lexsort((position[kept], row[kept]))]
    selected = np.full((placement.num_rows, num_slots), -1, np.int32)
    selected[row[kept], index_in_row(row[kept])] = position[kept]
    return selected, np.bincount(piece[kept], minlength=len(chosen))
