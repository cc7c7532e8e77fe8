"""A stream's blocks contain every token exactly once, also if the stream is resumed."""

import tracemalloc
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from material import VOCAB_SIZE, assert_same_block, memory_source, text_stream, word_tokenizer, words, write_parquet

from pipeline.config.choices import LongDocuments, OnError, Packing, Positions
from pipeline.config.schema import BatchConfig, CaptureConfig, ParquetData
from pipeline.core.errors import ConfigError, InputError
from pipeline.data.documents import STREAM_START, Cursor, Document, TokenBlock
from pipeline.data.feed import StreamWork
from pipeline.data.parquet import ParquetSource
from pipeline.data.selection import open_selection
from pipeline.data.stream import TokenStream
from pipeline.data.text.contexts import NOTHING

TOKENIZER = word_tokenizer()
SELECTIONS = (
    CaptureConfig(positions=Positions.last, per_row=1),
    CaptureConfig(positions=Positions.regex, regex="[37]$", per_row=1),
    CaptureConfig(positions=Positions.sample, rate=0.4, seed=3),
    CaptureConfig(positions=Positions.every, every=2),
)


@st.composite
def cases(draw, overlap_always=False):
    """Documents as token ids by file, and settings for the source and its streams."""
    sizes = draw(st.lists(st.lists(st.integers(1, 40), max_size=8), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shards = [[rng.integers(2, VOCAB_SIZE, size).tolist() for size in shard] for shard in sizes]
    length, overlap = draw(st.integers(2, 24)), 0
    packing, long_documents = draw(st.sampled_from(Packing)), draw(st.sampled_from(LongDocuments))
    if overlap_always:
        packing, long_documents = draw(st.sampled_from([Packing.pack, Packing.pad])), LongDocuments.split
    if packing is not Packing.concat and long_documents is LongDocuments.split:
        overlap = draw(st.sampled_from([1, max(1, length // 4), length - 1] if overlap_always else [0, 1, length // 4]))
    return shards, {
        "row_groups_per_shard": draw(st.sampled_from([None, 1, 2])),
        "num_streams": draw(st.integers(1, 4)),
        "rows_per_block": draw(st.integers(1, 5)),
        "length": length,
        "packing": packing,
        "long_documents": long_documents,
        "overlap": overlap,
        "selection": draw(st.sampled_from([CaptureConfig(), *SELECTIONS])),
    }


def streams(shards, settings) -> list[TokenStream]:
    settings = dict(settings)
    batch = BatchConfig(length=settings["length"], overlap=settings.pop("overlap", 0))
    if capture := settings.get("selection"):
        settings["selection"] = open_selection(capture, batch, TOKENIZER)
    source = memory_source("/stream", shards, row_groups_per_shard=settings.pop("row_groups_per_shard", None))
    return [text_stream(source, TOKENIZER, stream=number, **settings) for number in range(settings["num_streams"])]


def tokens_by_document(blocks: list[TokenBlock]) -> dict[int, list[int]]:
    """Each document's tokens, scanning blocks, rows and positions upward."""
    found: dict[int, list[int]] = {}
    for block in blocks:
        valid = block.documents >= 0
        for document, token in zip(block.documents[valid].tolist(), block.tokens[valid].tolist(), strict=True):
            found.setdefault(document, []).append(token)
    return found


@given(cases())
def test_every_token_is_stored_once_in_order_or_counted_as_cut(case):
    shards, settings = case
    length, cut = settings["length"], settings["long_documents"] is LongDocuments.cut
    expected = {f"{shard}-{row}": ids for shard, rows in enumerate(shards) for row, ids in enumerate(rows)}
    seen: dict[str, list[int]] = {}
    for stream in streams(shards, settings):
        blocks = list(stream.blocks())
        assert [block.index for block in blocks] == list(range(len(blocks)))
        assert [block.exhausted for block in blocks] == [False] * (len(blocks) - 1) + [True]
        names = {row["document"]: row["id"] for block in blocks for row in block.table.to_pylist()}
        for document, tokens in tokens_by_document(blocks).items():
            assert document % settings["num_streams"] == stream.stream
            assert names[document] not in seen
            seen[names[document]] = tokens
        cut_tokens = {row["id"]: row["n_cut"] for block in blocks for row in block.table.to_pylist()}
        for name, dropped in cut_tokens.items():
            assert dropped == (max(len(expected[name]) - length, 0) if cut else 0)
    assert seen == {name: ids[:length] if cut else ids for name, ids in expected.items()}


@given(cases())
def test_rows_follow_the_contract(case):
    shards, settings = case
    length = settings["length"]
    for stream in streams(shards, settings):
        for block in stream.blocks():
            assert block.tokens.shape[1] == length
            assert bool(block.table) <= block.num_rows <= settings["rows_per_block"]
            padding = block.segments == 0
            assert np.all(block.documents[padding] == -1)
            assert not block.tokens[padding].any()
            assert not block.positions[padding].any()
            rows_of: dict[int, set[int]] = {}
            for row in range(block.num_rows):
                segments = block.segments[row]
                valid = int(np.count_nonzero(segments))
                assert np.all(segments[:valid] > 0)
                starts = np.flatnonzero(np.diff(segments[:valid], prepend=0))
                assert segments[starts].tolist() == list(range(1, len(starts) + 1))
                assert settings["packing"] is Packing.pack or len(starts) == 1
                for first, last in zip(starts, [*starts[1:], valid], strict=True):
                    assert block.positions[row, first:last].tolist() == list(range(last - first))
                    numbers = block.documents[row, first:last]
                    context = np.count_nonzero(numbers < 0)
                    assert context in (0, settings["overlap"])
                    assert (numbers[context:] >= 0).all()
                    documents = set(numbers[context:].tolist())
                    assert settings["packing"] is Packing.concat or len(documents) == 1
                    for document in documents:
                        rows_of.setdefault(document, set()).add(row)
            counts = {document: int(np.sum(block.documents == document)) for document in rows_of}
            table = block.table.to_pylist()
            assert [row["document"] for row in table] == sorted(rows_of)
            for row in table:
                assert row["last_token"] - row["first_token"] == counts[row["document"]]
                is_whole = row["n_tokens"] <= length and settings["packing"] is not Packing.concat
                assert not is_whole or len(rows_of[row["document"]]) == 1
                assert row["url"] == "http://" + row["id"].replace("-", "/")


@given(cases(overlap_always=True))
def test_a_window_begins_with_the_tokens_before_its_own_which_are_not_selected(case):
    shards, settings = case
    length, overlap, positions = settings["length"], settings["overlap"], settings["selection"].positions
    texts = {f"{shard}-{row}": ids for shard, rows in enumerate(shards) for row, ids in enumerate(rows)}
    for stream in streams(shards, settings):
        ends: dict[int, int] = {}  # by document: the end of its last window
        for block in stream.blocks():
            names = {row["document"]: row["id"] for row in block.table.to_pylist()}
            for row, first in np.argwhere((block.segments > 0) & (block.positions == 0)).tolist():
                window = np.flatnonzero(block.segments[row] == block.segments[row, first])
                number = int(block.documents[row, window[-1]])
                text, begin = texts[names[number]], ends.get(number, 0)
                context = min(begin, overlap)
                assert block.tokens[row, window].tolist() == text[begin - context :][: len(window)]
                assert block.documents[row, window].tolist() == [-1] * context + [number] * (len(window) - context)
                ends[number] = begin + len(window) - context
                assert len(window) == length or ends[number] == len(text)
            is_selected = np.zeros_like(block.tokens, bool)
            row, slot = np.nonzero(block.selected >= 0)
            is_selected[row, block.selected[row, slot]] = True
            is_own = block.documents >= 0
            assert not (is_selected & ~is_own).any()
            if positions in (Positions.all, Positions.every):
                np.testing.assert_array_equal(
                    is_selected, is_own & (positions is Positions.all) | is_own & (block.positions % 2 == 1)
                )


@given(cases(), st.data())
def test_resuming_after_any_block_gives_the_same_remaining_blocks(case, data):
    for stream in streams(*case):
        blocks = list(stream.blocks())
        done = data.draw(st.integers(1, len(blocks)))
        resumed = list(stream.blocks(Cursor(**blocks[done - 1].next.to_json()), done))
        assert len(resumed) == len(blocks) - done
        for left, right in zip(resumed, blocks[done:], strict=True):
            assert_same_block(left, right)


@given(cases(), st.integers(1, 200), st.integers(1, 200))
def test_wanted_tokens_decide_how_many_blocks_there_are_and_nothing_else(case, wanted, more):
    """Work for more tokens continues after that for fewer, as if it had been asked for at once."""
    for stream in streams(*case):
        whole = list(stream.blocks())
        first = list(StreamWork(stream, wanted=wanted).blocks(lambda: False))
        assert sum(block.num_tokens for block in first[:-1]) < wanted
        assert first[-1].exhausted or sum(block.num_tokens for block in first) >= wanted
        missing = wanted + more - sum(block.num_tokens for block in first)
        left = []
        if missing > 0 and not first[-1].exhausted:
            left = list(StreamWork(stream, first[-1].next, len(first), missing).blocks(lambda: False))
        together = list(StreamWork(stream, wanted=wanted + more).blocks(lambda: False))
        for made, at_once, expected in zip([*first, *left], together, whole[: len(together)], strict=True):
            assert_same_block(made, expected)
            assert_same_block(at_once, expected)


def test_streams_take_shards_in_turn():
    shards = [[[shard + 2]] for shard in range(5)]
    two = streams(shards, {"num_streams": 2, "rows_per_block": 8, "length": 4, "packing": Packing.pad})
    assert [block.table["id"].to_pylist() for stream in two for block in stream.blocks()] == [
        ["0-0", "2-0", "4-0"],
        ["1-0", "3-0"],
    ]
    assert [block.table["document"].to_pylist() for stream in two for block in stream.blocks()] == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize("stream", [0, 2])
def test_a_stream_without_documents_gives_one_block_without_rows(stream):
    stream = streams([[]], {"num_streams": 3, "rows_per_block": 2, "length": 4})[stream]
    (block,) = StreamWork(stream, wanted=10).blocks(lambda: False)
    assert (block.num_rows, block.table.num_rows, block.exhausted) == (0, 0, True)
    assert list(stream.blocks(block.next, 1)) == []
    source = bad_source(OnError.skip, text=["", None], id=["a", "b"])
    (block,) = text_stream(source, TOKENIZER, rows_per_block=2, length=4).blocks()
    assert (block.num_rows, block.num_tokens, block.exhausted) == (0, 0, True)
    assert [skip.index for skip in block.skipped] == [0, 1]


def bad_source(on_error: OnError, **column) -> ParquetSource:
    write_parquet("memory:///bad/a.parquet", {"text": pa.array(column["text"], pa.string()), "id": column["id"]}, 2)
    return ParquetSource(ParquetData(source="parquet", path="memory:///bad/a.parquet", on_error=on_error))


def bad_stream(on_error: OnError) -> TokenStream:
    texts = ["w2 w3", None, "w4", "w950", "   ", "w5"]
    source = bad_source(on_error, text=texts, id=[f"d{number}" for number in range(len(texts))])
    return text_stream(source, TOKENIZER, rows_per_block=1, length=2, on_error=on_error, vocab_size=900)


def test_skipped_documents_are_recorded_with_the_next_block():
    blocks = list(bad_stream(OnError.skip).blocks())
    assert [block.table["id"].to_pylist() for block in blocks] == [["d0"], ["d2", "d5"]]
    assert [[(skip.index, skip.reason) for skip in block.skipped] for block in blocks] == [
        [(1, "'text' is null")],
        [
            (3, "token id 950 is outside the model's vocabulary of 900"),
            (4, "the tokenizer gives no token for the text"),
        ],
    ]
    assert [block.next for block in blocks] == [Cursor(0, 2, 0, 1), Cursor(1, 0, 0, 3)]
    (resumed,) = bad_stream(OnError.skip).blocks(blocks[0].next, 1)
    assert_same_block(resumed, blocks[1])


def test_an_id_outside_the_vocabulary_names_the_document():
    source = bad_source(OnError.fail, text=["w2 w3", "w4 w5", "w6 w950"], id=["a", "b", "c"])
    blocks = text_stream(source, TOKENIZER, rows_per_block=1, length=2, vocab_size=900).blocks()
    assert next(blocks).table["id"].to_pylist() == ["a"]
    with pytest.raises(InputError, match=r"a.parquet row 2 \(id c\): token id 950 is outside the model's vocabulary"):
        next(blocks)


@pytest.mark.parametrize(("length", "long_documents"), [(5, LongDocuments.split), (4, LongDocuments.cut)])
def test_a_cursor_made_with_other_settings_is_refused(length, long_documents):
    (stream,) = streams(
        [[[2] * 20]], {"num_streams": 1, "rows_per_block": 1, "length": length, "long_documents": long_documents}
    )
    with pytest.raises(ConfigError, match="cannot start at token 4 of a document"):
        next(stream.blocks(Cursor(0, 0, 4, 0)))


def test_blocks_are_made_lazily():
    """So the bad row at the end does not affect the first blocks."""
    write_parquet(
        "memory:///lazy/a.parquet",
        {"text": pa.array([*[words([2, 3, 4])] * 2000, None], pa.string()), "id": [str(i) for i in range(2001)]},
        100,
    )
    source = ParquetSource(ParquetData(source="parquet", path="memory:///lazy"))
    stream = text_stream(source, TOKENIZER, rows_per_block=2, length=6)
    assert [block.num_tokens for block in islice(stream.blocks(STREAM_START), 400)] == [12] * 400


class TextSource:
    """`count` documents of one text, each in its own string."""

    shards = ("texts",)
    info_schema, added = pa.schema([]), NOTHING

    def __init__(self, text: str, count: int) -> None:
        self._text = text
        self._count = count

    def read(self, shard: int, start: int) -> Iterator[Document]:
        for index in range(start, self._count):
            yield Document(str(index), self._text + " " * (index + 1), "texts", index)

    def fingerprint(self) -> dict[str, object]:
        return {}


@pytest.mark.parametrize(
    ("text", "long_documents"),
    [
        (("w7" + 6000 * " ") * 20, LongDocuments.split),  # 14 MB of texts in a block
        ("w7 " * 20_000, LongDocuments.cut),  # 7 MB, and 10 MB of tokens that are cut
    ],
    ids=["texts", "tokens that are cut"],
)
def test_documents_waiting_for_their_block_keep_only_what_it_needs(text, long_documents):
    settings = {"rows_per_block": 256, "length": 64, "packing": Packing.pad, "long_documents": long_documents}
    few, many = (text_stream(TextSource(text, count), TOKENIZER, **settings) for count in (1, 120))
    list(few.blocks())  # pyarrow imports pandas when it is first used
    tracemalloc.start()
    try:
        [block] = many.blocks()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert block.table.num_rows == 120
    assert set(block.table["n_tokens"].to_pylist()) == {text.count("w7")}
    assert peak < 10e6
