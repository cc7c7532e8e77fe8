"""`data.tokens`: ids from a column are taken as they are, or the document is a bad one. Prompts that are cut."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest
from material import assert_same_block, memory_source, text_stream, word_tokenizer, write_parquet

from pipeline.config.choices import LongPrompts, OnError, Packing, Positions, Windows
from pipeline.config.schema import BatchConfig, CaptureConfig, HfData, ParquetData
from pipeline.core.errors import ConfigError, InputError
from pipeline.data.documents import STREAM_START, Cursor, Document, with_tokens
from pipeline.data.hf import HfSource
from pipeline.data.parquet import ParquetSource
from pipeline.data.selection import open_selection
from pipeline.data.sources import open_source
from pipeline.data.text.contexts import Added, open_added
from pipeline.data.tokenised import TokenisedDocuments

PACKED = {"ids": [5, 6, 7, 8, 9]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"ids": [5, 6, 7]}, [[5, 6, 7]]),
        ({"ids": np.array([5, 6], np.uint16), "attention_mask": None}, [[5, 6]]),
        ({"ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]}, [[5, 6]]),
        ({"ids": [5, 6, 9], "attention_mask": [True, True, False]}, [[5, 6]]),
        (PACKED | {"position_ids": [0, 1, 0, 1, 2]}, [[5, 6], [7, 8, 9]]),
        (PACKED | {"position_ids": [3, 4, 0, 0, 1]}, [[5, 6], [7], [8, 9]]),
        (PACKED | {"position_ids": [0, 1, 2, 3, 4], "seq_lengths": [2, 3]}, [[5, 6, 7, 8, 9]]),
        (PACKED | {"seq_lengths": [1, 3, 1]}, [[5], [6, 7, 8], [9]]),
        (PACKED | {"seq_lengths": [2, 2, 1], "attention_mask": [0, 1, 0, 1, 0]}, [[6], [8]]),
        (PACKED | {"seq_lengths": [2, 2]}, "sums to 4, but 'ids' has 5 tokens"),
        (PACKED | {"seq_lengths": [5, 1, -1]}, "'seq_lengths' sums to 5"),
        (PACKED | {"position_ids": [0, 1]}, "'position_ids' has 2 values for the 5 tokens"),
        ({"ids": [5, 6], "attention_mask": [1]}, "'attention_mask' has 1 values for the 2 tokens"),
        ({"ids": [5, 6], "attention_mask": [1, 2]}, "not 0 or 1 for each token"),
        ({"ids": [5], "attention_mask": [0]}, "has no tokens"),
        ({"ids": []}, "has no tokens"),
        ({"ids": None}, "'ids' is 'None', expected a list of integers"),
        ({}, "'ids' is 'None', expected a list of integers"),
        ({"ids": "5 6"}, "'ids' is '5 6', expected a list of integers"),
        ({"ids": [5, None]}, "expected a list of integers"),
        ({"ids": [5.0]}, "expected a list of integers"),
        ({"ids": [[5], [6]]}, "expected a list of integers"),
        ({"ids": [[5], 6]}, "expected a list of integers"),
        ({"ids": [-1]}, "token ids -1 to -1"),
        ({"ids": [1 << 31]}, "expected 0 to 2147483647"),
        ({"ids": [1 << 64]}, "expected a list of integers"),
    ],
)
def test_rows_have_ids_or_are_bad(row, expected):
    document = Document("a", "", "b", 0)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            with_tokens(document, row, "ids")
    else:
        document = with_tokens(document, row, "ids")
        assert [part.tolist() for part in np.split(document.tokens, document.breaks)] == expected
        assert document.tokens.dtype == np.int32


@pytest.mark.parametrize("packing", Packing)
def test_the_texts_of_a_packed_row_are_apart_and_in_order(tmp_path, packing):
    rows, lengths = [list(range(10, 23)), [5]], [[6, 1, 6], [1]]
    source = ParquetSource(write(tmp_path, pa.int32(), input_ids=rows, seq_lengths=lengths))
    selection = open_selection(CaptureConfig(positions=Positions.last, per_row=4), BatchConfig(length=4), None)
    added = Added((2,)) if packing is Packing.concat else Added((10,))
    settings = dict(rows_per_block=3, length=4, packing=packing, added=added, selection=selection)
    stream = text_stream(source, None, **settings)
    blocks = list(stream.blocks())
    in_rows = [pair for block in blocks for pair in zip(block.tokens, block.segments, strict=True)]
    found = [tokens[segments == s].tolist() for tokens, segments in in_rows for s in (1, 2, 3, 4)]
    expected = {
        Packing.concat: [[2, 10, 11, 12], [2, 13, 14, 15], [2, 16, 17, 18], [2, 19, 20, 21], [2, 22, 5]],
        Packing.pad: [[10, 11, 12, 13], [10, 14, 15], [16], [17, 18, 19, 20], [21, 22], [5]],
    }
    expected[Packing.pack] = expected[Packing.pad]
    assert [row for row in found if row] == expected[packing]
    chosen = [pair for block in blocks for pair in zip(block.tokens, block.selected, strict=True)]
    assert [int(row[p]) for row, places in chosen for p in places if p >= 0] == [15, 16, 22, 5]
    for done in range(1, len(blocks)):
        for left, right in zip(stream.blocks(blocks[done - 1].next, done), blocks[done:], strict=True):
            assert_same_block(left, right)
    wrong = 99 if packing is Packing.concat else 1
    with pytest.raises(ConfigError, match=f"cannot start at token {wrong} of a document"):
        next(stream.blocks(Cursor(token=wrong)))


def write(folder, kind=None, **columns):
    arrays = {name: pa.array(values, pa.list_(kind) if kind else None) for name, values in columns.items()}
    write_parquet(str(folder / "ids.parquet"), arrays)
    return ParquetData(source="parquet", path=str(folder), id_column=None, tokens="input_ids")


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint16()])
def test_all_readers_give_the_same_documents(tmp_path, kind):
    rows = {"input_ids": [[5, 6, 0], [7, 8, 9], [2, 0, 0]], "attention_mask": [[1, 1, 0], [1, 1, 1], [1, 0, 0]]}
    config = write(tmp_path, kind, **rows)
    lines = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    (tmp_path / "ids.jsonl").write_text("".join(map("{}\n".format, map(json.dumps, lines))))
    files = {"parquet": "ids.parquet", "json": "ids.jsonl"}
    sources = [ParquetSource(config)]
    for path, name in files.items():
        settings = HfData(source="hf", path=path, data_files=str(tmp_path / name), tokens="input_ids")
        sources.append(HfSource(settings, None))
    for source in sources:
        assert [document.tokens.tolist() for document in source.read(0, 0)] == [[5, 6], [7, 8, 9], [2]]
        assert source.fingerprint()["tokens"] == "input_ids"
        assert not {"text", "text_column"} & source.fingerprint().keys()
        [block] = text_stream(source, None, rows_per_block=2, length=8).blocks()
        assert block.tokens.tolist() == [[5, 6, 7, 8, 9, 2, 0, 0]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tokens": [[1]]}, "has no column 'input_ids', only 'tokens'. Set data.tokens to one of them"),
        ({"input_ids": [1, 2]}, "column 'input_ids' is int64, expected lists of integers. Set data.tokens"),
        ({"input_ids": ["a"]}, "column 'input_ids' is string, expected lists of integers"),
        ({"input_ids": [["a"]]}, "is list<.*string>, expected lists of integers"),
    ],
)
def test_wrong_columns_are_refused(tmp_path, columns, message):
    with pytest.raises(InputError, match=message):
        open_source(write(tmp_path, **columns), None)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([5, 1000], "token id 1000 is outside the model's vocabulary of 1000"),
        ([5, 6, 9, 9], "it has padding (token id 9) without a column 'attention_mask'"),
        ([9, 9, 5, 6], "it has padding (token id 9)"),
        ([9, 5, 6, 9], None),
    ],
)
def test_vocabulary_and_padding_are_checked(tmp_path, ids, reason):
    source = ParquetSource(write(tmp_path, input_ids=[[0, 1], ids]))
    settings = {"vocab_size": 1000, "on_error": OnError.skip, "rows_per_block": 4, "length": 8}
    tokenizer = word_tokenizer()
    tokenizer.named = {"pad_token": "w9", "eos_token": "w9"}
    [block] = text_stream(source, tokenizer, **settings).blocks()
    assert [reason in skip.reason for skip in block.skipped] == [True] * (reason is not None)
    assert block.num_tokens == 2 + len(ids) * (reason is None)


def test_ids_without_the_tokenizers_bos_are_named_once(tmp_path, caplog):
    for ids, warned in (([5, 6], True), ([0, 5], False)):
        source = ParquetSource(write(tmp_path, input_ids=[ids, [7]]))
        caplog.clear()
        list(text_stream(source, word_tokenizer(bos=True), rows_per_block=4, length=8).blocks())
        assert caplog.text.count("tokenizer words puts [0] before every text") == warned


@pytest.mark.parametrize(
    ("batch", "bad"),
    [
        ({"windows": Windows.restart}, True),
        ({}, False),
        ({"windows": Windows.restart, "packing": Packing.concat}, False),
    ],
)
def test_ids_without_a_start_cannot_restart(tmp_path, batch, bad):
    tokenizer, source = word_tokenizer(bos=True), ParquetSource(write(tmp_path, input_ids=[[0, 1], [5, 6]]))
    added = open_added(BatchConfig(length=8, **batch), tokenizer)
    packing = batch.get("packing", Packing.pack)
    settings = {"on_error": OnError.skip, "rows_per_block": 4, "length": 8, "added": added, "packing": packing}
    [block] = text_stream(source, tokenizer, **settings).blocks()
    reasons = [r"its token ids begin with [5], not with [0], so batch.windows=restart has nothing to repeat"] * bad
    assert [skip.reason[: len(reason)] for skip, reason in zip(block.skipped, reasons, strict=True)] == reasons


@pytest.mark.parametrize(
    ("tokenizer", "max_prompt", "expected"),
    [
        ({}, 3, [([4, 5, 6], 2), ([7], 0)]),
        ({"bos": True}, 3, [([0, 5, 6], 3), ([0, 7], 0)]),
        ({"bos": True, "prefix": "w8"}, 4, [([8, 0, 5, 6], 3), ([8, 0, 7], 0)]),
        ({"bos": True, "prefix": "w8"}, 1, [([6], 6), ([7], 2)]),
    ],
)
def test_a_cut_prompt_keeps_prefix_and_special_tokens(tokenizer, max_prompt, expected):
    source = memory_source("/prompts", [[[2, 3, 4, 5, 6], [7]]])
    cut = {"max_prompt": max_prompt, "long_prompts": LongPrompts.cut}
    words = word_tokenizer(**tokenizer)
    documents = TokenisedDocuments(source, words, [0], on_error=OnError.fail, vocab_size=None, **cut)
    found = [(document.tokens.tolist(), document.num_cut) for document in documents.read(STREAM_START)]
    assert found == expected
