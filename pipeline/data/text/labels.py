"""Labels of a rendered conversation: where each character, and so each token, comes from."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from jaxtyping import Int, Int16, Int32


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
