"""Reads a tokenizer's files: tokenizer.json, tokenizer_config.json and chat templates."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import fsspec
from tokenizers import Tokenizer

from pipeline.core.errors import InputError
from pipeline.core.file_errors import named_errors
from pipeline.core.hub import is_hub_id, open_repository
from pipeline.core.json_text import parse_json
from pipeline.core.retries import repeated
from pipeline.data.text.tokenizer_settings import TokenizerSettings, library_errors, wrong_value

_KEY = "model.tokenizer or model.path"
_MAX_BYTES = 256 << 20  # per file; the largest published tokenizer.json has 35 MB
_MAX_ID = 2**31 - 1  # ids are stored in 32 bits


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
    place = _HubPlace(path, revision) if is_hub_id(path) else _FolderPlace(path)
    definition = place.read("tokenizer.json")
    if definition is None:
        raise InputError(
            f"{path} has no tokenizer.json. Expected a directory, a remote path or a Hub id with this file; "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` writes it."
        )
    tokenizer = _parse_tokenizer(definition, path)
    config = _json_object(place, "tokenizer_config.json")
    settings = TokenizerSettings(f"{path}/tokenizer_config.json", config)
    with library_errors(f"{path}/tokenizer_config.json does not fit tokenizer.json"):
        if "added_tokens_decoder" not in config:  # transformers then also reads files of its early versions
            early = (_json_object(place, name) for name in ("special_tokens_map.json", "added_tokens.json"))
            settings.add_early_files(*early)
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
    return TokenizerFiles(tokenizer, digest.hexdigest(), _chat_templates(place, config), named, adds)


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


def _json_object(place: "_FolderPlace | _HubPlace", name: str) -> dict[str, Any]:
    """The object in a JSON file; an empty one without the file. Raises InputError."""
    where = f"{place.where}/{name}"
    raw = place.read(name)
    try:
        value = parse_json(raw) if raw else {}
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}. Download or save it again.") from error
    if not isinstance(value, dict):
        raise wrong_value(where, "its content", value, "an object")
    return value


def _chat_templates(place: "_FolderPlace | _HubPlace", config: Mapping[str, Any]) -> dict[str, str]:
    """As in transformers, files have precedence over tokenizer_config.json."""
    files = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
    templates = {}
    for name, file in files.items():
        if content := place.read(file):
            try:
                templates[name] = content.decode()
            except UnicodeDecodeError as error:
                raise InputError(f"{place.where}/{file} is not UTF-8: {error}. Download or save it again.") from error
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
        f"{place.where}/tokenizer_config.json",
        "chat_template",
        config["chat_template"],
        "a string, or a list of objects with name and template",
    )


class _FolderPlace:
    """A local or remote directory. `read` returns None for a file that does not exist."""

    def __init__(self, path: str) -> None:
        self.where = path
        with self._named_errors():
            self._filesystem, self._root = fsspec.core.url_to_fs(path)
        if "://" not in path and not os.path.isdir(path):
            raise InputError(f"{path:.300} is neither a directory nor a Hub id. Correct model.tokenizer or model.path.")

    def read(self, name: str) -> bytes | None:
        file = f"{self._root.rstrip('/')}/{name}"
        with self._named_errors():
            try:
                # `exists` would return False for an unreachable file.
                info = repeated(file, lambda: self._filesystem.info(file))
                if info["type"] != "file":  # reading a named pipe might never end
                    raise InputError(
                        f"{self.where}/{name} is not a regular file. Replace it with the tokenizer's file."
                    )
                _check_size(f"{self.where}/{name}", info["size"])
                return repeated(file, lambda: self._filesystem.cat_file(file))
            except FileNotFoundError:
                return None

    def _named_errors(self) -> AbstractContextManager[None]:
        return named_errors(self.where, key=_KEY, invalid=InputError)


class _HubPlace:
    """A repository on the Hub, at one commit. `read` as in `_FolderPlace`."""

    def __init__(self, repo: str, revision: str | None) -> None:
        self.where = repo
        self._repository = open_repository(repo, revision, file="tokenizer.json", key=_KEY, invalid=InputError)

    def read(self, name: str) -> bytes | None:
        file = self._repository and self._repository.file(name)
        if file is None:
            return None
        _check_size(f"{self.where}/{name}", file.stat().st_size)
        return file.read_bytes()


def _check_size(where: str, size: int) -> None:
    if size > _MAX_BYTES:
        raise InputError(f"{where} has {size:,} bytes, expected at most {_MAX_BYTES:,}. Download or save it again.")
