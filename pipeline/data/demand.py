"""How many documents a token budget takes."""

from pipeline.config import LongDocuments, Packing
from pipeline.data.packing import windows


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
