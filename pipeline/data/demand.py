"""How many documents a token budget needs, and the message if there are not enough."""

from collections.abc import Sequence

from pipeline.config.choices import LongDocuments, Packing
from pipeline.data.packing import windows

_NAMED_STREAMS = 8


class Demand:
    """Whether the added documents are all that the blocks of a token budget can read.

    A stream packs a block after it has read more documents than fit, so these are up to a block more than the budget.
    """

    def __init__(
        self,
        token_budget: int | None,
        rows_per_block: int,
        length: int,
        packing: Packing,
        long_documents: LongDocuments,
        first_token: int = 0,
    ) -> None:
        """token_budget: None is never met. first_token: the token of the first document at which the budget begins."""
        self.has_limit = token_budget is not None
        self._missing = token_budget or 0  # tokens
        self._spare = rows_per_block if packing is Packing.pad else rows_per_block * length  # in pieces, or tokens
        self._length = length
        self._packing = packing
        self._long_documents = long_documents
        self._first_token = first_token

    def add(self, num_tokens: int) -> None:
        """Adds the next document."""
        for first, last in windows(num_tokens, self._length, self._long_documents, self._first_token):
            used = min(last - first, self._missing)
            self._missing -= used
            if self._packing is Packing.pack:
                self._spare -= last - first - used
            elif not used:
                self._spare -= 1
        self._first_token = 0

    @property
    def is_met(self) -> bool:
        return self.has_limit and not self._missing and self._spare <= 0


def shortfall(stored: Sequence[int], budgets: Sequence[int]) -> str | None:
    """A message about streams of a finished store that have fewer tokens than their share; None if there are none.

    stored: each stream's tokens. budgets: each stream's share of `run.max_tokens`. The data of one stream may end
    early although that of others does not.
    """
    missing = {stream: budget - tokens for stream, (tokens, budget) in enumerate(zip(stored, budgets, strict=True))}
    missing = {stream: tokens for stream, tokens in missing.items() if tokens > 0}
    if not missing:
        return None
    largest = sorted(missing, key=lambda stream: -missing[stream])[:_NAMED_STREAMS]
    listed = ", ".join(f"stream {stream} by {missing[stream]:,}" for stream in sorted(largest))
    others = f" and {len(missing) - len(largest)} others" if len(missing) > len(largest) else ""
    return (
        f"the data ended {sum(missing.values()):,} tokens short of run.max_tokens={sum(budgets):,}: {listed}{others}. "
        "Use more data. If other streams have data left, use a new store with fewer streams (data.num_streams)."
    )
