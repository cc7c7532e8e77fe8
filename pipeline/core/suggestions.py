"""What a mistyped name was probably meant to be."""

import difflib
from collections.abc import Collection


def did_you_mean(name: str, names: Collection[str], *, cutoff: float = 0.6, ending: str = "") -> str:
    """A question for the end of a message, after a blank: the name most similar to `name`, and `ending`. Empty where no
    name has a similarity (difflib's, 0 to 1) of `cutoff`."""
    similar = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" Did you mean {similar[0]}{ending}?" if similar else ""
