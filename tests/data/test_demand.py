"""Blocks with the wanted tokens read no more documents than `Demand` says, for any packing and start."""

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from material import assert_same_block

from pipeline.config.choices import LongDocuments, Packing
from pipeline.data.documents import STREAM_START, Cursor, Document, TokenBlock
from pipeline.data.feed import Demand, StreamWork, shortfall
from pipeline.data.stream import TokenStream
from pipeline.data.text.contexts import NOTHING
from pipeline.data.tokenised import TokenisedDocument


class Documents:
    """Documents of the given sizes. Reading past the first `end` fails."""

    num_shards = 1
    info_schema, added = pa.schema([]), NOTHING

    def __init__(self, sizes: list[int], end: int | None = None) -> None:
        self.sizes = sizes
        self.end = end

    def read(self, start: Cursor, should_stop=lambda: False) -> Iterator[TokenisedDocument]:
        for number in range(start.ordinal, len(self.sizes)):
            assert self.end is None or number < self.end
            document = Document(str(number), "", "a", number)
            yield TokenisedDocument(
                document, np.arange(self.sizes[number], dtype=np.int32), Cursor(0, number, 0, number)
            )


@given(
    sizes=st.lists(st.integers(1, 16), min_size=50, max_size=60),
    wanted=st.integers(1, 100),
    rows=st.integers(1, 4),
    length=st.integers(1, 16),
    packing=st.sampled_from(Packing),
    long_documents=st.sampled_from(LongDocuments),
)
def test_blocks_read_no_more_than_their_demand(sizes, wanted, rows, length, packing, long_documents):
    def stream(end: int | None) -> TokenStream:
        return TokenStream(
            Documents(sizes, end),
            stream=0,
            num_streams=1,
            rows_per_block=rows,
            length=length,
            packing=packing,
            long_documents=long_documents,
        )

    def needed(start: Cursor, wanted: int) -> int | None:
        """The number of documents that meet the demand; None if all are too few."""
        demand = Demand(stream(None), start, wanted)
        for number in range(start.ordinal, len(sizes)):
            if demand.is_met:
                return number
            demand.add(sizes[number])
        return len(sizes) if demand.is_met else None

    def blocks(end: int | None) -> list[TokenBlock]:
        return list(StreamWork(stream(end), wanted=wanted).blocks(lambda: False))

    end, made = needed(STREAM_START, wanted), blocks(None)
    for found, expected in zip(blocks(end), made, strict=True):
        assert_same_block(found, expected)
    left = wanted  # a run that resumes at a later block needs the same documents
    for before, block in pairwise(made):
        left -= before.num_tokens
        assert needed(block.start, left) == end


@pytest.mark.parametrize(
    ("stored", "budget", "message"),
    [
        ([100, 120], 100, None),
        ([], 0, None),
        ([0, 190, 30], 100, "the data of 2 streams ended 170 tokens short of run.max_tokens=300. Use more data"),
    ],
)
def test_a_shortfall_is_reported(stored, budget, message):
    said = shortfall(stored, [budget] * len(stored))
    assert (said is None) if message is None else re.search(message, said)
