"""How many documents a token budget takes, and what is said when there are not so many."""

from collections.abc import Sequence

from pipeline.config.choices import LongDocuments, Packing
from pipeline.data.packing import windows

_NAMED_STREAMS = 8


class Demand:
    """Whether the documents that were added are all that the blocks of a token budget may read.

    A block is placed once there is more than it takes, so they are a block more than the budget.
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
        """`first_token`: of the first document, where the budget begins. Without a budget nothing is enough."""
        self.has_limit = token_budget is not None
        self._missing = token_budget or 0  # tokens
        self._spare = rows_per_block if packing is Packing.pad else rows_per_block * length  # pieces, or tokens
        self._length = length
        self._packing = packing
        self._long_documents = long_documents
        self._first_token = first_token

    def add(self, num_tokens: int) -> None:
        """Adds the next document."""
        for first, last in windows(num_tokens, self._length, self._long_documents, self._first_token):
            taken = min(last - first, self._missing)
            self._missing -= taken
            if self._packing is Packing.pack:
                self._spare -= last - first - taken
            elif not taken:
                self._spare -= 1
        self._first_token = 0

    @property
    def is_met(self) -> bool:
        return self.has_limit and not self._missing and self._spare <= 0


def shortfall(stored: Sequence[int], budgets: Sequence[int]) -> str | None:
    """What to tell of a finished store by stream: the tokens that it has, and the share of `run.max_tokens`.

    None where every stream has its share. A stream's data may end early though another's has more to give.
    """
    missing = {stream: budget - tokens for stream, (tokens, budget) in enumerate(zip(stored, budgets, strict=True))}
    missing = {stream: tokens for stream, tokens in missing.items() if tokens > 0}
    if not missing:
        return None
    largest = sorted(missing, key=lambda stream: -missing[stream])[:_NAMED_STREAMS]
    named = ", ".join(f"stream {stream} by {missing[stream]:,}" for stream in sorted(largest))
    others = f" and {len(missing) - len(largest)} others" if len(missing) > len(largest) else ""
    return (
        f"the data ended {sum(missing.values()):,} tokens short of run.max_tokens={sum(budgets):,}: {named}{others}. "
        "Give more data, or fewer streams (data.num_streams, of a new store) if the others have data left."
    )
