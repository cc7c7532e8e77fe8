"""Reads a tokenizer's files: tokenizer.json, tokenizer_config.json and chat templates."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import fsspec
from tokenizers import Tokenizer

from pipeline.core.errors import InputError
from pipeline.core.hub import is_hub_id, open_repository
from pipeline.core.json_text import parse_json
from pipeline.core.requests import named_errors, repeated
from pipeline.data.text.tokenizer_settings import TokenizerSettings, library_errors, wrong_value

_KEY = "model.tokenizer or model.path"
_MAX_BYTES = 256 << 20  # per file; the largest published tokenizer.json has 35 MB
_MAX_ID = 2**31 - 1  # ids are stored in 32 bits
Read = Callable[[str], bytes | None]  # the content of the file with a name; None if it does not exist


class NoTokenizer(InputError):
    """A directory or repository has no tokenizer.json."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of a tokenizer's files, with tokenizer_config.json applied.

    digest: identifies what determines ids. templates: the sources of the chat templates by name. named_tokens:
    bos_token and others. adds: the token and whether it is added, by `add_bos_token` and `add_eos_token`.
    """

    tokenizer: Tokenizer
    digest: str
    templates: dict[str, str]
    named_tokens: dict[str, str]
    adds: dict[str, tuple[str, bool]]


def read_tokenizer_files(path: str, revision: str | None) -> TokenizerFiles:
    """Reads the files in a directory, at a remote path (`gs://...`) or in a Hub repository. Raises InputError if one is
    missing, damaged or not supported, and PipelineError if they cannot be reached."""
    read = _hub_reader(path, revision) if is_hub_id(path) else _folder_reader(path)
    definition = read("tokenizer.json")
    if definition is None:
        raise NoTokenizer(
            f"{path} has no tokenizer.json. Set model.tokenizer to a directory, a remote path or a Hub id with this "
            "file; `AutoTokenizer.from_pretrained(...).save_pretrained(...)` writes it."
        )
    tokenizer = _parse_tokenizer(definition, path)
    config = _json_object(path, read, "tokenizer_config.json")
    settings = TokenizerSettings(f"{path}/tokenizer_config.json", config)
    with library_errors(f"{path}/tokenizer_config.json does not fit tokenizer.json"):
        if "added_tokens_decoder" not in config:  # transformers then also reads files of its early versions
            early = ("special_tokens_map.json", "added_tokens.json")
            settings.add_early_files(*(_json_object(path, read, name) for name in early))
        changes = settings.apply(tokenizer)
    digest = hashlib.sha256(definition)
    if changes:
        digest.update(json.dumps(changes, sort_keys=True).encode())
    named = settings.named_tokens()
    adds = {
        name: (named[token], config[name])
        for name, token in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token"))
        if isinstance(config.get(name), bool) and token in named
    }
    return TokenizerFiles(tokenizer, digest.hexdigest(), _chat_templates(path, read, config), named, adds)


def _parse_tokenizer(definition: bytes, where: str) -> Tokenizer:
    """Raises InputError."""
    with library_errors(f"{where}/tokenizer.json is not a tokenizer"):
        tokenizer = Tokenizer.from_str(definition.decode())
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > _MAX_ID:
        raise InputError(
            f"{where}/tokenizer.json has the token id {largest}, expected at most {_MAX_ID}. Download or save it again."
        )
    return tokenizer


def _json_object(path: str, read: Read, name: str) -> dict[str, Any]:
    """The object in a JSON file; an empty one without the file. Raises InputError."""
    where = f"{path}/{name}"
    raw = read(name)
    try:
        value = parse_json(raw) if raw else {}
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}. Download or save it again.") from error
    if not isinstance(value, dict):
        raise wrong_value(where, "its content", value, "an object")
    return value


def _chat_templates(path: str, read: Read, config: Mapping[str, Any]) -> dict[str, str]:
    """As in transformers, files have precedence over tokenizer_config.json."""
    files = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
    templates = {}
    for name, file in files.items():
        if content := read(file):
            try:
                templates[name] = content.decode()
            except UnicodeDecodeError as error:
                raise InputError(f"{path}/{file} is not UTF-8: {error}. Download or save it again.") from error
    template = config.get("chat_template")
    if "default" in templates or template is None:
        return templates
    if isinstance(template, str):
        template = {"default": template}
    with suppress(AttributeError, KeyError, TypeError):
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        if all(isinstance(text, str) for item in template.items() for text in item):
            return template | templates
    raise wrong_value(
        f"{path}/tokenizer_config.json",
        "chat_template",
        config["chat_template"],
        "a string, or a list of objects with name and template",
    )


def _folder_reader(path: str) -> Read:
    """Reads files of a local or remote directory."""

    def errors() -> AbstractContextManager[None]:
        return named_errors(path, key=_KEY, invalid=InputError)

    with errors():
        filesystem, root = fsspec.core.url_to_fs(path)
    if "://" not in path and not os.path.isdir(path):
        raise InputError(f"{path:.300} is neither a directory nor a Hub id. Correct model.tokenizer or model.path.")

    def read(name: str) -> bytes | None:
        file = f"{root.rstrip('/')}/{name}"
        with errors():
            try:
                info = repeated(file, lambda: filesystem.info(file))  # `exists` is False for an unreachable file
                if info["type"] != "file":  # reading a named pipe might never end
                    raise InputError(f"{path}/{name} is not a regular file. Replace it with the tokenizer's file.")
                _check_size(f"{path}/{name}", info["size"])
                return repeated(file, lambda: filesystem.cat_file(file))
            except FileNotFoundError:
                return None

    return read


def _hub_reader(repo: str, revision: str | None) -> Read:
    """Reads files of a repository on the Hub, at one commit."""
    repository = open_repository(repo, revision, file="tokenizer.json", key=_KEY, invalid=InputError)

    def read(name: str) -> bytes | None:
        file = repository and repository.file(name)
        if file is None:
            return None
        _check_size(f"{repo}/{name}", file.stat().st_size)
        return file.read_bytes()

    return read


def _check_size(where: str, size: int) -> None:
    if size > _MAX_BYTES:
        raise InputError(f"{where} has {size:,} bytes, expected at most {_MAX_BYTES:,}. Download or save it again.")
