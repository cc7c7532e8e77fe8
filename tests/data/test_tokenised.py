"""Prompts with a maximum number of tokens."""

import pytest
from material import memory_source, word_tokenizer

from pipeline.config.choices import LongPrompts, OnError
from pipeline.data.documents import STREAM_START
from pipeline.data.tokenised import TokenisedDocuments


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
