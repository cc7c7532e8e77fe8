"""Tokenizers: what they add, chat templates, and damaged files: one message names the file."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from material import memory_source, text_stream, word_library_tokenizer, word_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from pipeline.config import composing
from pipeline.config.choices import OnError, SpecialTokens
from pipeline.core.errors import ConfigError, InputError
from pipeline.data.sources import ChatSource
from pipeline.data.text.tokenizer import TextTokenizer, load_tokenizer


def save(directory, *, config: dict | None = None, jinja: str | None = None, bos: bool = False, **settings):
    tokenizer = word_library_tokenizer(bos=bos)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (directory / "chat_template.jinja").write_text(jinja)
    return load_tokenizer(str(directory), **settings)


def ids(tokenizer, *texts: str) -> list[list[int]]:
    return [array.tolist() for array in tokenizer.encode(texts)]


def test_truncation_and_padding_of_the_file_are_disabled(tmp_path):
    assert ids(save(tmp_path), "w2 w3 w4", "w5") == [[2, 3, 4], [5]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 2, 3]),
        ({"special_tokens": SpecialTokens.none}, [2, 3]),
        ({"prefix": "w8"}, [8, 0, 2, 3]),
        ({"suffix": "w9", "special_tokens": SpecialTokens.none}, [2, 3, 9]),
        ({"prefix": "w0", "suffix": "w9", "special_tokens": SpecialTokens.none}, [0, 2, 3, 9]),
    ],
)
def test_special_tokens_prefix_and_suffix_are_added(settings, expected):
    assert ids(word_tokenizer(bos=True, **settings), "w2 w3") == [expected]


@pytest.mark.parametrize(("text", "count"), [("w2 w3", 2), ("", 0)])
def test_a_prefix_must_be_one_token(text, count):
    with pytest.raises(ConfigError, match=rf"data.prefix='{text}' is {count} tokens for tokenizer words, expected one"):
        word_tokenizer(prefix=text)


def test_settings_and_file_determine_the_identity(tmp_path):
    identities = [
        save(tmp_path).identity(),
        save(tmp_path, prefix="w2").identity(),
        save(tmp_path, special_tokens=SpecialTokens.none).identity(),
        save(tmp_path, bos=True).identity(),
    ]
    assert len({json.dumps(identity, sort_keys=True) for identity in identities}) == 4
    assert save(tmp_path).identity() == identities[0]


@pytest.mark.parametrize("path", ["memory:///tokenizers/words", "~/words"])
def test_remote_files_and_home_directories_are_read(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "words").mkdir()
    with fsspec.open(path + "/tokenizer.json", "w") as file:
        file.write(word_library_tokenizer().to_str())
    assert ids(load_tokenizer(path), "w7") == [[7]]


@pytest.mark.parametrize("path", ["{tmp_path}", "nope://words", "/no/such/directory"])
def test_a_path_without_a_tokenizer_is_refused(path, tmp_path):
    path = path.format(tmp_path=tmp_path)
    with pytest.raises(InputError, match=rf"{path}.* (has no tokenizer.json|cannot be opened|is neither a directory)"):
        load_tokenizer(path)


QUESTION = [{"role": "user", "content": "w2"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    ("config", "jinja"),
    [
        ({"bos_token": "w0", "chat_template": TEMPLATE}, None),
        ({"bos_token": {"content": "w0", "lstrip": False}, "chat_template": TEMPLATE}, None),
        ({"bos_token": "w0", "chat_template": [{"name": "default", "template": TEMPLATE}]}, None),
        ({"bos_token": "w0", "chat_template": "other"}, TEMPLATE),
    ],
    ids=["config", "token as object", "named templates", "file before config"],
)
def test_chat_templates_are_found_and_rendered(tmp_path, config, jinja):
    tokenizer = save(tmp_path, config=config, jinja=jinja)
    assert tokenizer.chat().render(QUESTION, add_generation_prompt=True) == "w0<user>w2<assistant>"
    assert tokenizer.chat().render(QUESTION, add_generation_prompt=False) == "w0<user>w2"


def test_tools_choose_the_template_for_them(tmp_path):
    named = [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    tools = {"tools": [{"name": "f"}]}

    def rendered(*, own=None, **settings) -> str:
        tokenizer = save(tmp_path, config={"chat_template": named}, **settings)
        text = tokenizer.chat(own).render(QUESTION, tools=own, add_generation_prompt=True)
        assert tokenizer.chat(own).render_labelled(QUESTION, tools=own, add_generation_prompt=True).text == text
        return text

    assert rendered() == "default"
    assert rendered(own=[{"name": "g"}]) == "g"
    assert rendered(template_kwargs=tools) == "f"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file {{ tools | length }}")
    assert rendered(template_kwargs=tools) == "file 1"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% if %}", "the chat template of tokenizer .* fails"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "fails: access to attribute '__class__'"),
    ],
)
def test_unusable_chat_templates_are_refused(tmp_path, template, message):
    with pytest.raises(ConfigError, match=message):
        save(tmp_path, jinja=template).require_chat()


def test_a_text_that_the_library_refuses_is_an_error():
    tokenizer = TextTokenizer(Tokenizer(WordLevel({"a": 0})), name="words", digest="0")
    with pytest.raises(ValueError, match="the tokenizer refuses the text: WordLevel error: Missing"):
        tokenizer.encode(["a", "b"])


def test_starts_are_places_in_the_text_and_what_is_added_has_none():
    library = word_library_tokenizer()
    ids = [(f"w{i}", i) for i in (0, 1, 3)]
    library.post_processor = TemplateProcessing(single="w0 w1 $A w3", special_tokens=ids)
    tokenizer = TextTokenizer(library, name="words", digest="0", prefix="w8", suffix="w9")
    [starts] = tokenizer.encode_with_starts(["w1 w2 w3"])  # w1 and w3 are not added beside themselves
    assert starts.tolist() == [[8, -1], [0, -1], [1, 0], [2, 3], [3, 6], [9, -1]]


def test_only_a_text_that_is_too_long_is_skipped(monkeypatch):
    monkeypatch.setattr("pipeline.data.text.tokenizer.MAX_CHARACTERS", 9)
    source = memory_source("/long", [[[2, 3, 4], [5, 6, 7, 8], [9]]])
    settings = {"rows_per_block": 2, "length": 4, "on_error": OnError.skip}
    (block,) = text_stream(source, word_tokenizer(), **settings).blocks()
    assert block.tokens.tolist() == [[2, 3, 4, 9]]
    reason = "it has 11 characters, expected at most 9: divide the document"
    assert [(skip.index, skip.reason) for skip in block.skipped] == [(1, reason)]


TRICKY = "{{ 1 // (messages[0].content|length - 2) }}"


@pytest.mark.parametrize("on_error", OnError)
def test_a_chat_that_does_not_render_is_reported_or_skipped(tmp_path, on_error):
    source = memory_source("/chats", [[[2, 3], [4], [5, 6]]])
    chats = ChatSource(source, save(tmp_path, jinja=TRICKY), on_error)
    reason = "the chat template of tokenizer .* fails: integer division or modulo by zero"
    if on_error is OnError.fail:
        with pytest.raises(InputError, match=rf"000.parquet row 1: {reason}. Correct .*data.on_error=skip"):
            list(chats.read(0, 0))
        return
    first, skip, last = chats.read(0, 0)
    assert (first.text, last.text) == ("0", "0")
    assert (skip.source, skip.index) == ("000.parquet", 1)
    assert re.match(reason, skip.reason)


def test_a_chat_template_that_repeats_special_tokens_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Set data.special_tokens=none"):
        save(tmp_path, jinja=TEMPLATE, bos=True).require_chat()
    save(tmp_path, jinja=TEMPLATE, bos=True, special_tokens=SpecialTokens.none).require_chat()


@pytest.fixture(scope="module")
def qwen2(shared):
    """transformers' tokenizer and ours from the same files."""
    transformers = pytest.importorskip("transformers")
    path = str(shared / "tokenizers" / "qwen2")
    return transformers.AutoTokenizer.from_pretrained(path), load_tokenizer(path)


def test_a_chat_is_rendered_as_by_transformers(qwen2):
    reference, tokenizer = qwen2
    for chat in (QUESTION, [{"role": "system", "content": "  s "}, *QUESTION, {"role": "assistant", "content": "é\n"}]):
        for prompt in (True, False):
            expected = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert tokenizer.chat().render(chat, add_generation_prompt=prompt) == expected


def test_ids_equal_those_of_transformers(qwen2):
    reference, tokenizer = qwen2
    texts = ["Hello world", " é\u00a0日本\n\n", "a<|endoftext|>b", "0123456789"]
    assert ids(tokenizer, *texts) == reference(texts)["input_ids"]
    assert tokenizer.vocab_size == len(reference)


TINY = composing.PACKAGE / "assets" / "tiny-qwen2"
Damage = Callable[[Path], object]


def content(name: str, text: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(text)


def settings(**values: object) -> Damage:
    return content("tokenizer_config.json", json.dumps(values).encode())


def definition(**values: object) -> Damage:
    def edit(folder: Path) -> None:
        file = folder / "tokenizer.json"
        whole = json.loads(file.read_text())
        whole["model"] |= values
        file.write_text(json.dumps(whole))

    return edit


def pipe(name: str) -> Damage:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return edit


DAMAGE: dict[str, dict[str, Damage]] = {  # by file
    "tokenizer.json": {
        "pipe": pipe("tokenizer.json"),
        "large": lambda folder: os.truncate(folder / "tokenizer.json", 1 << 40),
        "no UTF-8": content("tokenizer.json", b"\xff\xfe"),
        "deep": content("tokenizer.json", b'{"version":' * 10**5),
        "long error": content("tokenizer.json", b'{"truncation":"' + b"9" * 10**5 + b'"}'),
        "large id": definition(vocab={"a": 2**31}, merges=[]),
    },
    "": {"dropout": definition(dropout=0.5)},
    "tokenizer_config.json": {
        "pipe": pipe("tokenizer_config.json"),
        "deep": content("tokenizer_config.json", b"[" * 10**5),
        "a list": content("tokenizer_config.json", b"[]"),
        "a token, a list": settings(bos_token=[1]),
        "a token with a list": settings(eos_token={"content": ["a"]}),
        "template, an object": settings(chat_template={"a": 1}),
        "templates without names": settings(chat_template=[{"template": "x"}]),
    },
    "chat_template.jinja": {
        "directory": lambda folder: (folder / "chat_template.jinja").mkdir(),
        "no UTF-8": content("chat_template.jinja", b"\xff"),
    },
}


@pytest.mark.parametrize(("file", "case"), [(file, case) for file, cases in DAMAGE.items() for case in cases])
def test_a_damaged_tokenizer_is_refused(file: str, case: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "tokenizer"))
    DAMAGE[file][case](folder)
    with pytest.raises(InputError, match=f"{folder}.*{re.escape(file)}") as caught:
        load_tokenizer(str(folder))
    assert caught.value.exit_code == 2
    assert re.search(r"\. (Download|Replace|Set|Correct) .*\.$", str(caught.value))
    assert len(str(caught.value)) < 1000
