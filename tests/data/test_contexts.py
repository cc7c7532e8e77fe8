"""Rows of joined documents follow SAELens's rule, and windows that restart look like documents of their own."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from material import assert_same_block, memory_source, text_stream, word_tokenizer

from pipeline.config.choices import LongDocuments, Packing, Positions, Windows
from pipeline.config.schema import BatchConfig, CaptureConfig
from pipeline.core.errors import ConfigError
from pipeline.data.documents import Cursor, Document
from pipeline.data.selection import open_selection
from pipeline.data.stream import TokenStream
from pipeline.data.text.contexts import Added, open_added
from pipeline.data.text.labels import Label
from pipeline.data.tokenised import TokenisedDocument

TOKENIZER = word_tokenizer()
# Few different tokens, so that texts often begin with a BOS or a separator of their own.
DOCUMENTS = st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=30), min_size=1, max_size=12)


def joined_rows(documents, length, bos, separator) -> list[list[int]]:
    """The rule that SAELens documents, token by token. The last row may be short."""
    rows = [[]]
    for document in documents:
        queue = [*([separator] if separator is not None and document[0] != separator else []), *document]
        has_separator = len(queue) > len(document)
        if has_separator and len(rows[-1]) % length == 0:  # nothing precedes it in its row
            queue = queue[1:]
        for token in queue:
            if len(rows[-1]) == length:
                rows.append([])
            if not rows[-1] and bos is not None and token != bos:
                rows[-1].append(bos)
            rows[-1].append(token)
    return rows


def stream(documents, added, rows_per_block, **settings):
    return text_stream(
        memory_source("/contexts", [documents]), TOKENIZER, added=added, rows_per_block=rows_per_block, **settings
    )


@given(DOCUMENTS, st.integers(2, 9), st.sampled_from([None, 2]), st.sampled_from([None, 2, 3]), st.integers(1, 4))
def test_joined_rows_are_those_of_saelens(documents, length, bos, separator, rows_per_block):
    added = Added(() if bos is None else (bos,), separator=None if separator is None else (separator,))
    made = stream(documents, added, rows_per_block, length=length, packing=Packing.concat)
    blocks = list(made.blocks())
    rows = [row[segments > 0].tolist() for b in blocks for row, segments in zip(b.tokens, b.segments, strict=True)]
    assert rows == joined_rows(documents, length, bos, separator)
    assert all(block.num_rows == rows_per_block for block in blocks[:-1])
    tokens = {number: [] for number in range(len(documents))}
    for block in blocks:
        valid = block.segments > 0
        assert set(block.segments[valid].tolist()) <= {1}  # attention across documents
        assert np.array_equal(block.positions, np.where(valid, np.arange(length), 0))
        assert np.all(np.diff(block.documents[valid]) >= 0)
        for row in block.table.to_pylist():
            here = block.tokens[block.documents == row["document"]].tolist()
            assert len(tokens[row["document"]]) == row["first_token"]
            tokens[row["document"]] += here
            assert len(tokens[row["document"]]) == row["last_token"] <= row["n_tokens"]
    for number, own in enumerate(documents):  # what was added can be left out again
        left = [token for token in tokens[number] if token not in (bos, separator)]
        assert left == [token for token in own if token not in (bos, separator)]
    for done in range(1, len(blocks)):
        resumed = list(made.blocks(Cursor(**blocks[done - 1].next.to_json()), done))
        for left, right in zip(resumed, blocks[done:], strict=True):
            assert_same_block(left, right)


@given(DOCUMENTS, st.integers(4, 9), st.sampled_from([(2,), ()]), st.sampled_from([(5,), ()]), st.sampled_from(Packing))
def test_windows_that_restart_begin_and_end_like_a_document(documents, length, before, after, packing):
    documents = [[*before, *document, *after] for document in documents]
    packing = Packing.pack if packing is Packing.concat else packing
    added = Added(before, after)
    made = stream(documents, added, 3, length=length, packing=packing)
    blocks, windows = list(made.blocks()), {number: [] for number in range(len(documents))}
    for block in blocks:
        for row, segments, numbers in zip(block.tokens, block.segments, block.documents, strict=True):
            for segment in range(1, segments.max() + 1):
                windows[int(numbers[segments == segment][0])].append(row[segments == segment].tolist())
    for number, document in enumerate(documents):
        found = windows[number]
        assert [len(window) for window in found[:-1]] == [length] * (len(found) - 1)
        assert all(tuple(w[: len(before)]) == before and tuple(w[len(w) - len(after) :]) == after for w in found)
        text, start = document[len(before) : len(document) - len(after)], 0
        for window in found:
            own = window[: len(window) - len(after)]
            is_own_bos = start and before and text[start : start + 1] == list(before)  # it is put once
            part = own if is_own_bos else own[len(before) :]
            assert text[start : start + len(part)] == part
            start += len(part)
        assert start == len(text)
    for done in range(1, len(blocks)):
        resumed = list(made.blocks(Cursor(**blocks[done - 1].next.to_json()), done))
        for left, right in zip(resumed, blocks[done:], strict=True):
            assert_same_block(left, right)
    cut = stream(documents, added, 3, length=length, packing=packing, long_documents=LongDocuments.cut)
    for block in cut.blocks():
        for row in block.table.to_pylist():
            tokens = block.tokens[block.documents == row["document"]].tolist()
            assert tokens == windows[row["document"]][0]
            assert row["n_cut"] == max(0, len(documents[row["document"]]) - length)


class LabelledDocuments:
    """Documents of 5 and 6 tokens, 10, 11, ... and 20, 21, ..., written by the assistant in exchanges 0, 1, 2, ..."""

    num_shards, info_schema = 1, pa.schema([])

    def __init__(self, added: Added) -> None:
        self.added = added

    def read(self, start, should_stop=lambda: False):
        for number, size in enumerate((5, 6)):
            labels = np.stack([np.arange(size), np.arange(size), *np.ones((3, size))], axis=1).astype(np.int16)
            tokens = np.arange(size, dtype=np.int32) + 10 * (number + 1)
            document = Document(str(number), "", "a", number)
            yield TokenisedDocument(document, tokens, Cursor(0, number, 0, number), labels=labels)


@pytest.mark.parametrize(
    ("packing", "added", "tokens", "exchanges"),
    [
        (
            Packing.concat,
            Added((2,), separator=(3,)),
            [[2, 10, 11, 12], [2, 13, 14, 3], [2, 20, 21, 22], [2, 23, 24, 25]],
            [[0, 0, 1, 2], [2, 3, 4, 0], [0, 0, 1, 2], [2, 3, 4, 5]],
        ),
        (
            Packing.pad,
            Added((10,)),
            [[10, 11, 12, 13], [10, 14], [20, 21, 22, 23], [24, 25]],
            [[0, 1, 2, 3], [3, 4], [0, 1, 2, 3], [4, 5]],
        ),
    ],
)
def test_labels_follow_their_tokens_and_added_ones_are_markup(packing, added, tokens, exchanges):
    settings = dict(stream=0, num_streams=1, rows_per_block=4, length=4, packing=packing)
    [block] = TokenStream(LabelledDocuments(added), **settings).blocks()
    valid = block.segments > 0
    assert [row[mask].tolist() for row, mask in zip(block.tokens, valid, strict=True)] == tokens
    exchange, written = block.labels[..., Label.exchange], block.labels[..., Label.written]
    assert [row[mask].tolist() for row, mask in zip(exchange, valid, strict=True)] == exchanges
    is_own = np.isin(block.tokens, (*range(10, 15), *range(20, 26)))
    is_own[1, 0] &= packing is Packing.concat  # what a window repeats
    assert np.array_equal(written == 1, is_own)


@pytest.mark.parametrize(
    ("capture", "expected"),
    [
        (CaptureConfig(positions=Positions.last, per_row=3), [(0, 4), (1, 0), (1, 2), (2, 1)]),
        (CaptureConfig(positions=Positions.last, per_row=1), [(0, 4), (1, 0), (2, 1)]),
        (CaptureConfig(positions=Positions.every, every=2), [(0, 1), (0, 3), (0, 5), (1, 1), (1, 3), (1, 5), (2, 1)]),
    ],
)
def test_selected_positions_are_those_of_joined_rows(capture, expected):
    """Rows of 6 with documents of 5, 2, 2 and 5 tokens; `last` is of each document, `every` of each row."""
    documents = [[7, 8, 9, 7, 8], [3, 4], [5, 6], [9, 9, 9, 9, 9]]
    selection = open_selection(capture, BatchConfig(length=6), TOKENIZER)
    made = stream(documents, Added(), 4, length=6, packing=Packing.concat, selection=selection)
    [block] = made.blocks()
    found = [(row, int(p)) for row, selected in enumerate(block.selected) for p in selected if p >= 0]
    assert found == expected
    left_out = sum(block.table["n_unselected"].to_pylist())
    assert left_out == (capture.positions is Positions.last) * (4 - len(found))


@pytest.mark.parametrize(
    ("batch", "settings", "expected"),
    [
        ({"windows": Windows.restart}, {"bos": True}, ((0,), (), None)),
        ({"windows": Windows.restart}, {"prefix": "w9", "suffix": "w8"}, ((9,), (8,), None)),
        ({"windows": Windows.restart, "packing": Packing.concat, "separator": "w8"}, {"bos": True}, ((0,), (), (8,))),
        ({"windows": Windows.restart, "packing": Packing.concat}, {"suffix": "w8", "bos": True}, ((0,), (), None)),
        ({"packing": Packing.concat, "separator": ""}, {"bos": True}, ((), (), ())),
        ({"windows": Windows.restart}, {}, "puts no token before a document"),
        ({"windows": Windows.restart, "length": 1}, {"bos": True}, "repeats 1 tokens"),
        ({"packing": Packing.concat}, {"suffix": "w8"}, ((), (), None)),
        ({"packing": Packing.concat}, {}, "nothing separates documents: tokenizer words .* or to '' to join them"),
        ({"packing": Packing.concat, "separator": ""}, {}, ((), (), ())),
        ({"packing": Packing.concat, "separator": "w8 w8"}, {}, "is 2 tokens"),
    ],
)
def test_added_tokens_are_those_of_tokenizer_and_settings(batch, settings, expected):
    batch = BatchConfig(**{"length": 8, **batch})
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            open_added(batch, word_tokenizer(**settings))
        return
    added = open_added(batch, word_tokenizer(**settings))
    assert (added.before, added.after, added.separator) == expected
