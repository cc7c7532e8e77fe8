"""Damaged tokenizer files are refused in one message that names the file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import composing
from pipeline.core.errors import InputError
from pipeline.data.text.tokenizer import load_tokenizer

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


CASES: dict[str, tuple[Damage, str]] = {
    "pipe": (pipe("tokenizer.json"), r"tokenizer\.json is not a regular file"),
    "pipe: settings": (pipe("tokenizer_config.json"), r"tokenizer_config\.json is not a regular file"),
    "directory": (lambda folder: (folder / "chat_template.jinja").mkdir(), r"chat_template\.jinja is not a regular"),
    "large": (
        lambda folder: os.truncate(folder / "tokenizer.json", 1 << 40),
        r"json has 1,099,.* bytes, expected at most",
    ),
    "no UTF-8": (content("tokenizer.json", b"\xff\xfe"), "is not a tokenizer: 'utf-8'"),
    "unknown kind": (content("tokenizer.json", b'{"model": {"type": "unheard of"}}'), "is not a tokenizer"),
    "deep": (content("tokenizer.json", b'{"version":' * 10**5), "is not a tokenizer"),
    "long error": (
        content("tokenizer.json", b'{"truncation":"' + b"9" * 10**5 + b'"}'),
        r"is not a tokenizer: .{300}\. Download or save it again\.$",
    ),
    "large id": (definition(vocab={"a": 2**31}, merges=[]), "has the token id 2147483648, expected at most 2147483647"),
    "dropout": (
        definition(dropout=0.5),
        r"dropout=0\.5, which gives different ids in every run\. Set its dropout to null",
    ),
    "settings: deep": (content("tokenizer_config.json", b"[" * 10**5), "is not JSON: nested too deeply"),
    "settings: a list": (content("tokenizer_config.json", b"[]"), r"its content is \[\], expected an object"),
    "settings: null": (content("tokenizer_config.json", b"null"), "its content is None, expected an object"),
    "a token, a list": (settings(bos_token=[1]), r"bos_token is \[1\], expected a string"),
    "a token, a number": (settings(eos_token=7), "eos_token is 7, expected a string"),
    "a token with a list": (settings(eos_token={"content": ["a"]}), r"eos_token is \{'content': \['a'\]\}, expected"),
    "a token without content": (settings(eos_token={"x": 1}), r"eos_token is \{'x': 1\}, expected a string"),
    "template, an object": (settings(chat_template={"a": 1}), r"chat_template is \{'a': 1\}, expected a string"),
    "template, a number": (settings(chat_template=1), "chat_template is 1, expected a string"),
    "templates without names": (settings(chat_template=[{"template": "x"}]), "expected a string, or a list of objects"),
    "templates, strings": (settings(chat_template=["x"]), "expected a string, or a list of objects"),
    "default, a number": (settings(chat_template=[{"name": "default", "template": 1}]), "expected a string, or a list"),
    "template: no UTF-8": (content("chat_template.jinja", b"\xff"), r"chat_template\.jinja is not UTF-8"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_tokenizer_is_refused(case: str, tmp_path: Path) -> None:
    damage, message = CASES[case]
    folder = Path(shutil.copytree(TINY, tmp_path / "tokenizer"))
    damage(folder)
    with pytest.raises(InputError, match=message) as caught:
        load_tokenizer(str(folder))
    assert caught.value.exit_code == 2
    assert str(folder) in str(caught.value)
