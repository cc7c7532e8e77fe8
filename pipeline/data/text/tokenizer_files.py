"""Reads a tokenizer's files: tokenizer.json, chat template and named tokens."""

import hashlib
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

import fsspec
from tokenizers import Tokenizer

from pipeline.core.errors import InputError
from pipeline.core.file_errors import named_errors
from pipeline.core.hub import is_hub_id, open_repository
from pipeline.core.json_text import parse_json, shown
from pipeline.core.retries import repeated
from pipeline.data.text.templates import NAMED_TOKENS

_KEY = "model.tokenizer or model.path"
_MAX_BYTES = 256 << 20  # per file; the largest published tokenizer.json has 35 MB
_MAX_ID = 2**31 - 1  # ids are stored in 32 bits


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of a tokenizer's files. digest: the sha256 of tokenizer.json. chat: the chat template's source."""

    tokenizer: Tokenizer
    digest: str
    chat: str | None
    named_tokens: dict[str, str]


def read_tokenizer_files(path: str, revision: str | None) -> TokenizerFiles:
    """Reads the files in a directory, at a remote path (`gs://...`) or in a Hub repository. Raises InputError if one is
    missing or damaged, and PipelineError if they cannot be reached."""
    place = _HubPlace(path, revision) if is_hub_id(path) else _FolderPlace(path)
    definition = place.read("tokenizer.json")
    if definition is None:
        raise InputError(
            f"{path} has no tokenizer.json. Expected a directory, a remote path or a Hub id with this file; "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` writes it."
        )
    tokenizer = _parse_tokenizer(definition, path)
    return TokenizerFiles(tokenizer, hashlib.sha256(definition).hexdigest(), *_chat_settings(place))


def _parse_tokenizer(definition: bytes, where: str) -> Tokenizer:
    """Raises InputError."""
    try:
        tokenizer = Tokenizer.from_str(definition.decode())
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    except BaseException as error:
        if not _is_from_tokenizers(error):
            raise
        raise InputError(
            f"{where}/tokenizer.json is not a tokenizer: {error!s:.300}. Download or save it again."
        ) from error
    if largest > _MAX_ID:
        raise InputError(
            f"{where}/tokenizer.json has the token id {largest}, expected at most {_MAX_ID}. Download or save it again."
        )
    return tokenizer


def _is_from_tokenizers(error: BaseException) -> bool:
    """Whether the library raises such errors: a plain Exception, a ValueError for text that is not UTF-8, or Rust's
    panic, which is not an Exception and cannot be imported."""
    return type(error) is Exception or isinstance(error, ValueError) or type(error).__name__ == "PanicException"


def _chat_settings(place: "_FolderPlace | _HubPlace") -> tuple[str | None, dict[str, str]]:
    """The chat template and named tokens. As in transformers, chat_template.jinja has precedence over
    tokenizer_config.json."""
    where = f"{place.where}/tokenizer_config.json"
    raw = place.read("tokenizer_config.json")
    try:
        config = parse_json(raw) if raw else {}
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}. Download or save it again.") from error
    if not isinstance(config, dict):
        raise _wrong(where, "its content", config, "an object")
    named = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if value and not isinstance(text, str):
            raise _wrong(where, name, value, "a string, or an object with the string content")
        if text:
            named[name] = text
    if file := place.read("chat_template.jinja"):
        try:
            return file.decode(), named
        except UnicodeDecodeError as error:
            raise InputError(
                f"{place.where}/chat_template.jinja is not UTF-8: {error}. Download or save it again."
            ) from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates: [{name, template}]
        if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in template):
            raise _wrong(where, "chat_template", template, "a string, or a list of objects with name and template")
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if template is not None and not isinstance(template, str):
        raise _wrong(where, "chat_template", template, "a string, or a list of objects with name and template")
    return template, named


def _wrong(where: str, key: str, value: object, expected: str) -> InputError:
    return InputError(f"{where}: {key} is {shown(value)}, expected {expected}. Download or save it again.")


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
