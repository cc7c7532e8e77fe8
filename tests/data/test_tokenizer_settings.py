"""The attributes of tokenizer_config.json: ids equal those of transformers, or the tokenizer is refused by name."""

import json
import random
from contextlib import nullcontext
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pipeline.config.choices import SpecialTokens
from pipeline.core.errors import InputError
from pipeline.data.text.tokenizer import load_tokenizer

_PIECES = [  # letters, white space, marks, digits, and special tokens
    *("hello", " world", "THE Fox", "a a a a", "\t", "\n\n", "\r\n", "\u00a0", "\u3000", "\u200d", "\u202e", "\ufeff"),
    *("é", "e\u0301", "ß", "İ", "ﬁ", "👩\u200d👧", "\x00", "汉字", "한국어"),
    *("123", "...", "'s", "▁", "Ġ", "##s", "<", "|"),
    *("<s>", "</s>", "<x>", "<new>", "<user>", "<X>", "hello<x>hello", "<new> <x>", "<x><x>"),
]


def texts(count: int = 150) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(_PIECES, k=rng.randint(1, 8))) for _ in range(count)]


def byte_level(post: str = "$A") -> Tokenizer:
    vocab = ["<s>", "</s>", "<user>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "llo", "hello", "Ġw"]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("Ġ", "w")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocab)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return finished(tokenizer, decoders.ByteLevel(), post)


def byte_level_normaliser() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.ByteLevel(), pre_tokenizers.Digits()
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", "<user>", "▁", "▁hello", "▁world", "hello", *"abcdehlorstw<>x123"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return finished(tokenizer, decoders.Metaspace(), "<s> $A")


def word_piece(lowercase: bool = True) -> Tokenizer:
    vocab = ["[UNK]", "<s>", "</s>", "<user>", "hello", "world", "the", "fox", *"aehlorstw123<>x", "##s", "##llo"]
    tokenizer = Tokenizer(models.WordPiece({token: number for number, token in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return finished(tokenizer, decoders.WordPiece(), "<s> $A </s>")


def finished(tokenizer: Tokenizer, decoder: decoders.Decoder, post: str) -> Tokenizer:
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<user>", normalized=False)])
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>", "<user>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=post, special_tokens=ids)
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level,
    "byte level, BOS": lambda: byte_level("<s> $A"),
    "byte level, as normaliser": byte_level_normaliser,
    "metaspace": metaspace,
    "word piece": word_piece,
    "cased": lambda: word_piece(lowercase=False),
}
UNCHANGED = ("nothing", "without effect", "map beside added tokens")
END, NEXT = -1, -2  # ids after the vocabulary of tokenizer.json


def token(content: str, **flags: bool) -> dict[str, object]:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True} | flags
    return {"content": content, **flags}


HONOURED: dict[str, dict[str, object]] = {
    "nothing": {},
    "added tokens": {"added_tokens_decoder": {END: token("<x>"), NEXT: token("<new>", special=False)}},
    "added token, stripping": {"added_tokens_decoder": {END: token("<x>", lstrip=True, rstrip=True)}},
    "added and named": {
        "added_tokens_decoder": {END: token("<x>", special=False)},
        "bos_token": "<x>",
        "pad_token": "<new>",
    },
    "extra before additional": {"additional_special_tokens": ["<x>"], "extra_special_tokens": ["<new>"]},
    "extra, by name, and additional": {
        "extra_special_tokens": {"image_token": "<x>"},
        "additional_special_tokens": ["<new>"],
    },
    "named token as object": {"pad_token": token("<x>", lstrip=True) | {"__type": "AddedToken"}},
    "a word as a token": {"pad_token": "hello"},
    "map": {"special_tokens_map.json": {"pad_token": "<x>", "additional_special_tokens": ["<new>"]}},
    "map beside added tokens": {"added_tokens_decoder": {}, "special_tokens_map.json": {"pad_token": "<x>"}},
    "added_tokens.json and map": {
        "added_tokens.json": {"<x>": END},
        "special_tokens_map.json": {"additional_special_tokens": ["<x>"]},
    },
    "without effect": {"model_max_length": 3, "max_length": 2, "legacy": False, "split_special_tokens": False},
}
REFUSED: list[dict[str, object]] = [  # one attribute each, which the message names
    {"added_tokens_decoder": {9999: token("<x>")}},  # another id
    {"added_tokens_decoder": {0: token("x" * 5000)}},
    {"added_tokens_decoder": {0: token("<x>")}},  # another token
    {"added_tokens_decoder": {"a": 1}},
    {"added_tokens_decoder": {0: token("<s>")}, "tokenizer_class": "GPT2Tokenizer"},  # only some of the tokens
    {"added_tokens.json": {"<x>": [1]}},
    {"extra_special_tokens": 5},
    {"add_prefix_space": True},
    {"add_bos_token": True, "bos_token": "</s>"},
    {"add_bos_token": False, "bos_token": "<s>"},
    {"add_eos_token": True, "eos_token": "</s>"},
    {"do_lower_case": True},
    {"keep_accents": False},
    {"auto_map": {"AutoTokenizer": ["a.B", None]}},
    {"tokenizer_class": "ByT5Tokenizer"},
    {"sp_model_kwargs": {"enable_sampling": True}},
    {"split_special_tokens": True},
    {"src_lang": "de"},
    {"mystery": 1},
]


def save(folder: Path, tokenizer: Tokenizer, config: dict[str, object]) -> str:
    size = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {name: value for name, value in config.items() if name.endswith(".json")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | {k: v for k, v in config.items() if k not in files}
    for name, value in (files | {"tokenizer_config.json": settings}).items():
        text = json.dumps(value)
        for number, given in ((END, size), (NEXT, size + 1)):
            text = text.replace(f'"{number}"', f'"{given}"').replace(f": {number}}}", f": {given}}}")
        (folder / name).write_text(text)
    return str(folder)


@pytest.mark.parametrize("case", HONOURED)
def test_ids_equal_those_of_transformers(case, tmp_path):
    """Except that a text which begins with BOS, or ends with EOS, gets it once."""
    transformers = pytest.importorskip("transformers")
    digests = set()
    for name, make in TOKENIZERS.items():
        folder = tmp_path / name
        folder.mkdir()
        path = save(folder, make(), HONOURED[case])
        reference, tokenizer = transformers.AutoTokenizer.from_pretrained(path), load_tokenizer(path)
        plain = load_tokenizer(path, special_tokens=SpecialTokens.none)
        twice = [reference(2 * token, add_special_tokens=False)["input_ids"] for token in ("<s>", "</s>")]
        for text in texts():
            assert plain.encode([text])[0].tolist() == reference(text, add_special_tokens=False)["input_ids"], text
            ids = reference(text)["input_ids"]
            if ids[:2] not in twice and ids[-2:] not in twice:
                assert tokenizer.encode([text])[0].tolist() == ids, text
        assert tokenizer.vocab_size == len(reference)
        digests.add(tokenizer.identity()["sha256"])
        (folder / "tokenizer_config.json").unlink()
        for file in ("special_tokens_map.json", "added_tokens.json"):
            (folder / file).unlink(missing_ok=True)
        digests.add(load_tokenizer(path).identity()["sha256"])
    assert len(digests) == len(TOKENIZERS) * (1 if case in UNCHANGED else 2)


@pytest.mark.parametrize("config", REFUSED)
def test_attributes_that_disagree_or_are_not_supported_are_refused(config, tmp_path):
    path = save(tmp_path, byte_level("<s> $A"), config)
    with pytest.raises(InputError, match=rf"{path}.*{next(iter(config))}.*\. (Correct|Remove|Add|Download) ") as caught:
        load_tokenizer(path)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("tokenizer", "config", "refused"),
    [
        ("word piece", {"do_lower_case": True, "strip_accents": None}, None),
        ("cased", {"do_lower_case": False}, None),
        ("cased", {}, "do_lower_case is True, the default of its tokenizer_class"),
        ("cased", {"do_lower_case": True}, "do_lower_case"),
        ("word piece", {"do_lower_case": False}, "do_lower_case"),
        ("word piece", {"strip_accents": False}, "strip_accents"),
        ("word piece", {"tokenize_chinese_chars": False}, "tokenize_chinese_chars"),
    ],
)
def test_berts_normaliser_must_be_the_one_of_its_class(tokenizer, config, refused, tmp_path):
    path = save(tmp_path, TOKENIZERS[tokenizer](), config | {"tokenizer_class": "BertTokenizerFast"})
    with pytest.raises(InputError, match=refused) if refused else nullcontext():
        load_tokenizer(path)


NONE = {"special_tokens": SpecialTokens.none}
ONCE = [  # the post-processor, settings, a text, and its ids
    ("<s> $A", {}, "<s>hello", [0, "hello"]),
    ("<s> $A", {"prefix": "<s>"}, "hello", [0, "hello"]),
    ("<s> $A", {"prefix": "<s>"}, "<s>hello", [0, "hello"]),
    ("<s> $A", {"prefix": "<s>", **NONE}, "<s>hello", [0, "hello"]),
    ("<s> $A </s>", {"suffix": "</s>"}, "hello", [0, "hello", 1]),
    ("<s> $A </s>", {}, "hello</s>", [0, "hello", 1]),
    ("<s> <user> $A", {}, "<s><user>hello", [0, 2, "hello"]),
    ("<s> $A", {}, "<s>", [0]),
    ("<s> $A </s>", {}, "<s></s>", [0, 1]),
]
TWICE = [
    ("<s> $A", {"prefix": "<user>"}, "hello", [2, 0, "hello"]),  # another token
    ("$A", {"prefix": "hello"}, "hello", ["hello", "hello"]),  # a word
    ("$A", {}, "<s><s>hello", [0, 0, "hello"]),  # in the text
]


@pytest.mark.parametrize("case", [*ONCE, *TWICE])
def test_a_special_token_is_never_put_beside_itself(case, tmp_path):
    post, settings, text, expected = case
    tokenizer = load_tokenizer(save(tmp_path, byte_level(post), {}), **settings)
    word = tokenizer.token_id("x", "hello")
    assert tokenizer.encode([text])[0].tolist() == [word if item == "hello" else item for item in expected]


@pytest.mark.parametrize(
    ("part", "value", "call"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "load"),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "encode"),
        ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}, "encode"),
        ("decoder", {"type": "Strip", "content": "h", "start": 5, "stop": 5}, "token_texts"),
        ("decoder", {"type": "Strip", "content": "h", "start": 5, "stop": 5}, "decode"),
    ],
)
def test_a_panic_of_the_library_is_an_error_of_the_file(part, value, call, tmp_path):
    path = save(tmp_path, byte_level(), {})
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: value}))
    calls = {"encode": lambda t: t.encode(["hello"]), "load": lambda t: None}
    calls["decode"] = lambda t: [t.decode([i]) for i in range(t.vocab_size)]
    expected = ValueError if call == "encode" else InputError
    run = calls.get(call, lambda t: t.token_texts())
    with pytest.raises(expected, match="cannot|refuses|is not a tokenizer"):
        run(load_tokenizer(path, special_tokens=SpecialTokens.none))
