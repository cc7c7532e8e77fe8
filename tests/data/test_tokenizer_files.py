"""Damaged tokenizer files are refused in one message that names the file."""

import json
import os
import re
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
