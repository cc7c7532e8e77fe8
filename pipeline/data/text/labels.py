"""Labels of a rendered conversation: where each character, and so each token, comes from. Words that choose by them.

Shapes: n tokens, each with the 5 columns of `Label`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from jaxtyping import Bool, Int, Int16, Int32


class Role(IntEnum):
    """Who wrote a message, or whom it is from."""

    none = 0
    system = 1
    developer = 2
    user = 3
    assistant = 4
    tool = 5


class Part(IntEnum):
    """What a text is within its message. markup: what the template writes itself."""

    none = 0
    markup = 1
    text = 2
    thinking = 3
    tool_call = 4
    tool_result = 5
    tool_definition = 6


class Label(IntEnum):
    """The columns of labels: the message's index (-1 for none), the number of its exchange, a `Role`, a `Part`, and 1
    where the assistant wrote it."""

    message = 0
    exchange = 1
    role = 2
    part = 3
    written = 4


REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message with its reasoning, the first one of transformers' own."""
LABELS = tuple(Label.__members__)


@dataclass(frozen=True)
class Labels:
    """The labels of a text's characters, in spans of equal labels.

    starts: the offset of each span's first character, ascending, the first 0. values: per span, a column for each
    `Label`.
    """

    starts: Int32[np.ndarray, "_"]
    values: Int16[np.ndarray, "_ 5"]

    def at(self, offsets: Int[np.ndarray, "_"]) -> Int16[np.ndarray, "_ 5"]:
        """The labels of the characters at `offsets`, which ascend, e.g. of each token's first character."""
        counts = np.diff(np.searchsorted(offsets, self.starts), append=len(offsets))
        return np.repeat(self.values, counts, axis=0)


@dataclass(frozen=True)
class LabelledText:
    """A rendered conversation. dropped: the characters of the conversation's texts that the template did not write."""

    text: str
    labels: Labels
    dropped: int


WRITTEN = Label.written.name
LAST = {"last_of_message": Label.message, "last_of_exchange": Label.exchange}
"""Of the tokens that the other words choose, the last one of each message or exchange."""
WORDS = (*(role.name for role in Role if role), *(part.name for part in Part if part), WRITTEN)
"""Of `capture.labels` and a reader's `TokenFilter`. A token is chosen if it has one of the named roles, one of the
named parts, and was written by the assistant if that is asked for."""


def chosen(words: Sequence[str], labels: Int16[np.ndarray, "*n 5"]) -> Bool[np.ndarray, "*n"]:
    """Whether each token is chosen by `words`, which may include those of `LAST` if the tokens are a document's."""
    keep = np.ones(labels.shape[:-1], bool)
    for column, kind in ((Label.role, Role), (Label.part, Part)):
        if named := [kind[word] for word in words if word in kind.__members__]:
            keep &= np.isin(labels[..., column], named)
    if WRITTEN in words:
        keep &= labels[..., Label.written] == 1
    for word in LAST.keys() & {*words}:
        places = np.flatnonzero(keep & (labels[:, Label.message] >= 0))[::-1]  # not what is in no message
        _, firsts = np.unique(labels[places, LAST[word]], return_index=True)
        keep[:] = False
        keep[places[firsts]] = True
    return keep
