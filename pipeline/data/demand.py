"""How many documents are needed for a number of tokens, and the message if there are not enough."""

from collections.abc import Sequence

from pipeline.config.choices import LongDocuments, Packing
from pipeline.core.messages import counted
from pipeline.data.documents import Cursor
from pipeline.data.packing import windows
from pipeline.data.stream import TokenStream


class Demand:
    """Whether the added documents are all that is read for whole blocks with the tokens that are wanted.

    The last of these blocks begins before the wanted tokens are reached, and is packed after more pieces of documents
    are read than fit into it. So these are the wanted tokens and a whole block more, however the pieces are packed.
    """

    def __init__(self, stream: TokenStream, start: Cursor, wanted: int | None) -> None:
        """Of the documents from `start` on. wanted: None is never met."""
        self.has_limit = wanted is not None
        self._stream = stream
        is_pad = stream.packing is Packing.pad
        self._tokens = (wanted or 0) + (0 if is_pad else stream.rows_per_block * stream.length)
        self._pieces = stream.rows_per_block if is_pad else 0  # after these tokens
        self._first_token = start.token  # of the first document, at which the blocks begin

    def add(self, num_tokens: int) -> None:
        """Adds the next document."""
        stream, first_token, self._first_token = self._stream, self._first_token, 0
        is_cut = stream.long_documents is LongDocuments.cut
        for first, last in windows(num_tokens, stream.length, overlap=stream.overlap)[: 1 if is_cut else None]:
            if self._tokens > 0:
                self._tokens -= max(0, last - max(first, first_token))
            elif first >= first_token:
                self._pieces -= 1

    @property
    def is_met(self) -> bool:
        return self.has_limit and self._tokens <= 0 and self._pieces <= 0


def shortfall(stored: Sequence[int], budgets: Sequence[int]) -> str | None:
    """A message about streams of a finished store that have fewer tokens than their share; None if there are none.

    stored: each stream's tokens. budgets: each stream's share of `run.max_tokens`. The data of one stream may end
    early although that of others does not.
    """
    missing = [max(0, budget - tokens) for tokens, budget in zip(stored, budgets, strict=True)]
    if not any(missing):
        return None
    return (
        f"the data of {counted(sum(map(bool, missing)), 'stream')} ended {sum(missing):,} tokens short of "
        f"run.max_tokens={sum(budgets):,}. Use more data. If other streams have data left, use a new store with fewer "
        "streams (data.num_streams)."
    )
