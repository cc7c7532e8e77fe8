"""Long texts are tokenised in pieces, with the ids of the whole."""

import random

import numpy as np
import pytest
from material import text_stream, word_library_tokenizer, word_tokenizer, words, write_parquet
from tokenizers import AddedToken, Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from pipeline.config.choices import OnError
from pipeline.config.schema import ParquetData
from pipeline.data.parquet import ParquetSource
from pipeline.data.text import long_texts
from pipeline.data.text.long_texts import encode_in_pieces
from pipeline.data.text.tokenizer import TextTokenizer

RNG = random.Random(0)
WORDS = ["".join(RNG.choices("etaoinsr", k=RNG.randint(1, 7))) for _ in range(4000)]
ENGLISH = " ".join(word + RNG.choice(["", "", ",", ".\n"]) for word in WORDS)
UNICODE = ["a", " ", "\u00e9", "e\u0301", "\u4f60\u597d", "\u3002", "\n", "\U0001f600", "12", "<s>"]
SPLIT = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def bpe(normalizer, pre_tokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<unk>"],
    )
    tokenizer.train_from_iterator([ENGLISH[i : i + 300] for i in range(0, 6000, 300)], trainer)
    if pre_tokenizer is None:  # SentencePiece models also learn from words
        tokenizer.pre_tokenizer = None
    return tokenizer


def byte_level(prefix: bool = False, regex: bool = True):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


LIKE_LLAMA_3 = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level(regex=False)])
LIKE_LLAMA_2 = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
KINDS = {
    "gpt2": (None, byte_level()),
    "roberta": (None, byte_level(prefix=True)),
    "llama3": (None, LIKE_LLAMA_3),
    "qwen2": (normalizers.NFC(), LIKE_LLAMA_3),
    "llama2": (LIKE_LLAMA_2, None),
    "gemma": (normalizers.Replace(" ", "\u2581"), pre_tokenizers.Split(" ", "merged_with_previous")),
    "t5": (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "bert": (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
    "strip": (normalizers.Strip(), byte_level()),
    "collapse": (normalizers.Replace(Regex(r"\s+"), " "), pre_tokenizers.Metaspace()),
    "fixed length": (None, pre_tokenizers.FixedLength(7)),
}
TEXTS = {
    "english": ENGLISH[:12_000],
    "code": "def f(x):\n    return x + 1\n\n" * 400,
    "unicode": "".join(RNG.choices(UNICODE, k=8000)),
    "white space": "".join(RNG.choices([" ", "\n", "\t", "a", "  b"], k=9000)),
}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    for name, characters in {"PIECE": 1500, "MAX_PIECE": 3000}.items():
        monkeypatch.setattr(long_texts, f"{name}_CHARACTERS", characters)
    monkeypatch.setattr(long_texts, "_CONTEXT", 256)
    monkeypatch.setattr(long_texts, "_SEARCHED", 700)
    monkeypatch.setattr("pipeline.data.text.tokenizer.PIECE_CHARACTERS", 1500)


def ids_and_starts(encoding: Encoding) -> np.ndarray:
    return np.array([encoding.ids, [first for first, _ in encoding.offsets]], np.int32).T


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_whole(kind):
    tokenizer = bpe(*KINDS[kind])
    tokenizer.add_tokens([AddedToken("<s>", lstrip=True), AddedToken("tor", rstrip=True), AddedToken("a b")])
    sizes = []

    def encode(text: str) -> np.ndarray:
        sizes.append(len(text))
        return ids_and_starts(tokenizer.encode(text, add_special_tokens=False))

    ours = TextTokenizer(tokenizer, name=kind, digest="0")
    for text in TEXTS.values():
        whole = encode(text)
        sizes.clear()
        difference = encode_in_pieces(encode, text) - whole
        assert not difference[:, 0].any()
        assert np.count_nonzero(difference[:, 1]) <= len(sizes)  # a piece's first token lacks the space before it
        assert max(sizes) <= 3000 + 256
        [found] = ours.encode_with_starts([text])
        assert (found == whole + difference).all()
        assert (ours.encode([text])[0] == whole[:, 0]).all()


@pytest.mark.parametrize("text", ["a" * 9000, " " * 9000, "7" * 9000])
def test_an_indivisible_stretch_is_refused(text):
    tokenizer = bpe(*KINDS["llama3"])
    with pytest.raises(ValueError, match="3000 characters from character 0 on without a place"):
        encode_in_pieces(lambda piece: ids_and_starts(tokenizer.encode(piece, add_special_tokens=False)), text)


def test_long_documents_have_special_tokens_and_prefix_once():
    library = word_library_tokenizer(bos=True)
    library.post_processor = processors.TemplateProcessing(
        single="w0 w1 $A w3", special_tokens=[(f"w{i}", i) for i in (0, 1, 3)]
    )
    tokenizer = TextTokenizer(library, name="words", digest="0", prefix="w8", suffix="w9")
    ids = [2 + i % 900 for i in range(2000)]
    long, short = tokenizer.encode([words(ids), words(ids[:3])])
    np.testing.assert_array_equal(long, [8, 0, 1, *ids, 3, 9])
    assert short.tolist() == [8, 0, 1, 2, 3, 4, 3, 9]
    [starts] = tokenizer.encode_with_starts(["w1 w2 w3"])  # w1 and w3 are not added beside themselves
    assert starts.tolist() == [[8, -1], [0, -1], [1, 0], [2, 3], [3, 6], [9, -1]]


def test_only_the_indivisible_document_is_skipped(tmp_path):
    path = str(tmp_path / "a.parquet")
    write_parquet(path, {"text": ["w2", "w" * 9000, "w3"], "id": ["a", "b", "c"]})
    source = ParquetSource(ParquetData(source="parquet", path=path, on_error=OnError.skip))
    settings = {"rows_per_block": 2, "length": 4, "on_error": OnError.skip}
    (block,) = text_stream(source, word_tokenizer(), **settings).blocks()
    assert block.table["id"].to_pylist() == ["a", "c"]
    assert [(skip.index, skip.reason[:39]) for skip in block.skipped] == [
        (1, "the text has 3000 characters from chara")
    ]
