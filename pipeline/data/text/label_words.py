"""Words that choose tokens by their labels, in `capture.labels` and in a reader's `TokenFilter`.

A word names a role, a part, or what the assistant wrote. A token is chosen if it has one of the named roles, one of the
named parts, and was written by the assistant if that is asked for.

Shapes: n tokens, each with the 5 columns of `Label`.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int16

from pipeline.data.text.labels import Label, Part, Role

WRITTEN = Label.written.name
LAST = {"last_of_message": Label.message, "last_of_exchange": Label.exchange}
"""Of the tokens that the other words choose, the last one of each message or exchange."""
WORDS = (*(role.name for role in Role if role), *(part.name for part in Part if part), WRITTEN)


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
