"""The whole data path with real text, real tasks and a real tokenizer."""

import json
import unicodedata
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
from material import text_stream

from pipeline.config.choices import LongDocuments, Template
from pipeline.config.schema import ArcData, ParquetData
from pipeline.data.arc.augment import Augmentation
from pipeline.data.sources import open_source
from pipeline.data.text.tokenizer import load_tokenizer
from tests.data.arc.undoing import decode_prompt, original_grid


@pytest.fixture(scope="module")
def tokenizer(shared):
    return load_tokenizer(str(shared / "tokenizers" / "qwen2"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"encoder": "separated"},
        {"encoder": "repeated", "template": Template.chat, "include_solution": True},
        {"encoder": "symbols", "symbols": "abcdefghij", "template": Template.chat},
    ],
    ids=lambda settings: settings.get("encoder", "digits"),
)
def test_every_grid_of_every_task_is_recovered_from_its_prompt(shared, tokenizer, settings):
    folder = shared / "data" / "arc_agi" / "training"
    source = open_source(ArcData(source="arc", path=str(folder), augmentations=2, **settings), tokenizer)
    documents = [document for shard in range(len(source.shards)) for document in source.read(shard, 0)]
    assert len(documents) == 2 * 416
    for document in documents:
        info = document.info
        task = json.loads((folder / f"{info['task']}.json").read_text())
        order = tuple(map(int, info["order"].split(",")))
        undo = partial(original_grid, Augmentation(info["geometry"], tuple(map(int, info["colors"])), order))
        *examples, test = decode_prompt(document.text, source._encoder)
        for number, pair in zip(order, examples, strict=True):
            assert undo(pair.input).tolist() == task["train"][number]["input"]
            assert undo(pair.output).tolist() == task["train"][number]["output"]
        expected = task["test"][info["test"]]
        assert undo(test.input).tolist() == expected["input"]
        assert settings.get("include_solution", False) == (test.output is not None)
        assert test.output is None or undo(test.output).tolist() == expected["output"]


def test_prompts_are_recovered_from_their_tokens(shared, tokenizer):
    source = open_source(ArcData(source="arc", path=str(shared / "data" / "arc_agi" / "training")), tokenizer)
    settings = {"rows_per_block": 4, "length": 8192, "long_documents": LongDocuments.cut}
    stream = text_stream(source, tokenizer, num_streams=25, **settings)
    texts = {document.id: document.text for shard in (0, 25) for document in source.read(shard, 0)}
    for block in stream.blocks():
        for row in block.table.to_pylist():
            ids = block.tokens[block.documents == row["document"]]
            assert tokenizer.decode(ids) == texts.pop(row["id"])
            assert (row["n_cut"], row["n_tokens"]) == (0, len(ids))
    assert not texts


def test_prose_is_recovered_from_its_tokens(shared, tokenizer):
    """The tokenizer normalises text to NFC. Many documents have several windows."""
    file = shared / "data" / "prose" / "000_00000.parquet"
    source = open_source(ParquetData(source="parquet", path=str(file)), tokenizer)
    blocks = list(text_stream(source, tokenizer, rows_per_block=8, length=512).blocks())
    valid = [block.segments > 0 for block in blocks]
    tokens, documents = (
        np.concatenate([getattr(block, name)[mask] for block, mask in zip(blocks, valid, strict=True)])
        for name in ("tokens", "documents")
    )
    names = {row["document"]: row["id"] for block in blocks for row in block.table.to_pylist()}
    found = {name: tokenizer.decode(tokens[documents == number]) for number, name in names.items()}
    texts = pq.read_table(file, columns=["id", "text"]).to_pylist()
    assert found == {row["id"]: unicodedata.normalize("NFC", row["text"]) for row in texts}
    assert tokens.size > 0.95 * sum(mask.size for mask in valid) > 10_000
