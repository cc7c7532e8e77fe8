"""Text to token ids with the `tokenizers` library: one tokenizer.json, the same ids as transformers' fast tokenizer."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Protocol

import fsspec
import jinja2
import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from pipeline.access import named_errors
from pipeline.config import SpecialTokens
from pipeline.data.templates import chat_template
from pipeline.errors import ConfigError, InputError
from pipeline.hub import is_hub_id, open_repository
from pipeline.json_text import parse_json, shown

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_KEY = "model.tokenizer or model.path"
_MAX_BYTES = 256 << 20  # of a file; the largest tokenizer.json published has 35 MB
_MAX_ID = 2**31 - 1  # ids are stored in 32 bits


class TextTokenizer:
    """Encodes documents and renders chats. Build one with `load_tokenizer`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        name: str,
        digest: str,
        special_tokens: SpecialTokens = SpecialTokens.tokenizer,
        prefix: str | None = None,
        suffix: str | None = None,
        chat: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Takes `tokenizer` over. `name` is for messages, `digest` identifies the tokenizer, `chat` is its chat
        template's source and `named_tokens` what that template knows: bos_token and such.
        """
        # A tokenizer.json may carry the truncation and padding of whoever saved it.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._add_special_tokens = special_tokens is SpecialTokens.tokenizer
        self._name = name
        self._chat = chat
        self._named_tokens = dict(named_tokens or {})
        self._prefix = [] if prefix is None else [self.token_id("data.prefix", prefix)]
        self._suffix = [] if suffix is None else [self.token_id("data.suffix", suffix)]
        self._identity = {
            "sha256": digest,
            "special_tokens": str(special_tokens),
            "prefix": prefix,
            "suffix": suffix,
        }

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def identity(self) -> dict[str, object]:
        """What determines the ids of a text: plain JSON values."""
        return dict(self._identity)

    def encode(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        """The ids of each text: prefix, what the tokenizer gives, suffix.

        Raises UnicodeEncodeError for a text with a lone surrogate, which no tokenizer can read.
        """
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=self._add_special_tokens)
        except TypeError:
            for text in texts:
                text.encode()
            raise
        if not (self._prefix or self._suffix):
            return [np.array(encoding.ids, np.int32) for encoding in encodings]
        return [np.array(self._prefix + encoding.ids + self._suffix, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, "_"], *, skip_special_tokens: bool = False) -> str:
        """The text of the ids."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's entry of one id, or None if there is none."""
        return self._tokenizer.id_to_token(token_id)

    def token_id(self, key: str, text: str) -> int:
        """The id of the one token that `text` is. Raises ConfigError, naming the setting `key`, for several or none."""
        token_id = self._tokenizer.token_to_id(text)
        ids = [token_id] if token_id is not None else self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ConfigError(
                f"{key}={text!r} is {len(ids)} tokens for tokenizer {self._name}, expected one. "
                f"Give the text of a single token, or null."
            )
        return ids[0]

    def token_texts(self) -> dict[int, str]:
        """What each token adds to a text, by id: not what it is by itself, where decoders drop the space before it."""
        ids = list(self._tokenizer.get_vocab(with_added_tokens=True).values())
        once = self._tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
        twice = self._tokenizer.decode_batch([[i, i] for i in ids], skip_special_tokens=False)
        return {i: both[len(one) :] for i, one, both in zip(ids, once, twice, strict=True)}

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The chat template's text of `messages`, as transformers' `apply_chat_template(tokenize=False)`.

        Raises ConfigError when the tokenizer has no chat template or the template refuses the messages.
        """
        if self._chat is None:
            raise ConfigError(
                f"tokenizer {self._name} has no chat template. Set data.template=plain or name another model.tokenizer."
            )
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._named_tokens
            )
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template of tokenizer {self._name} fails: {error}. Set data.template=plain."
            ) from error

    def require_chat(self) -> None:
        """Raises ConfigError unless chats can be rendered and tokenised without doubled special tokens."""
        self.render_chat([{"role": "user", "content": "0"}], add_generation_prompt=True)
        if self._add_special_tokens and self._tokenizer.num_special_tokens_to_add(is_pair=False):
            raise ConfigError(
                f"data.special_tokens=tokenizer, but tokenizer {self._name} would add its special tokens to those that "
                "the chat template writes. Set data.special_tokens=none."
            )

    def chat_identity(self) -> str | None:
        """SHA-256 of the chat template's source and its tokens."""
        if self._chat is None:
            return None
        return hashlib.sha256(json.dumps([self._chat, self._named_tokens], sort_keys=True).encode()).hexdigest()

    @cached_property
    def _template(self) -> jinja2.Template:
        return chat_template(self._chat)


def load_tokenizer(
    path: str,
    *,
    revision: str | None = None,
    special_tokens: SpecialTokens = SpecialTokens.tokenizer,
    prefix: str | None = None,
    suffix: str | None = None,
) -> TextTokenizer:
    """The tokenizer of a directory, a remote path (`gs://...`) or a Hub id: tokenizer.json and its chat template.

    Raises InputError when there is no readable tokenizer.json, ConfigError for a prefix or suffix of several tokens,
    and PipelineError when the place cannot be reached.
    """
    files = _open_place(os.path.expanduser(path), revision)
    definition = files.read("tokenizer.json")
    if definition is None:
        raise InputError(
            f"{path} has no tokenizer.json. Expected a directory, a remote path or a Hub id that has one; "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` writes it."
        )
    chat, named_tokens = _chat_settings(files)
    return TextTokenizer(
        _parse_tokenizer(definition, files.where),
        name=path,
        digest=hashlib.sha256(definition).hexdigest(),
        special_tokens=special_tokens,
        prefix=prefix,
        suffix=suffix,
        chat=chat,
        named_tokens=named_tokens,
    )


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
    """Whether this is how the library says that it cannot go on: a bare Exception, text that is not UTF-8, or Rust's
    panic, which is no Exception and has no name to import."""
    return type(error) is Exception or isinstance(error, ValueError) or type(error).__name__ == "PanicException"


def _chat_settings(files: "_Place") -> tuple[str | None, dict[str, str]]:
    """The chat template (chat_template.jinja before tokenizer_config.json, as in transformers) and named tokens."""
    where = f"{files.where}/tokenizer_config.json"
    raw = files.read("tokenizer_config.json")
    try:
        config = parse_json(raw) if raw else {}
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}. Download or save it again.") from error
    if not isinstance(config, dict):
        raise _wrong(where, "its content", config, "an object")
    named = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if value and not isinstance(text, str):
            raise _wrong(where, name, value, "a string, or an object with the string content")
        if text:
            named[name] = text
    if file := files.read("chat_template.jinja"):
        try:
            return file.decode(), named
        except UnicodeDecodeError as error:
            raise InputError(
                f"{files.where}/chat_template.jinja is not UTF-8: {error}. Download or save it again."
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


class _Place(Protocol):
    """Where a tokenizer's files lie. `read` gives None for a file that is not there."""

    where: str

    def read(self, name: str) -> bytes | None: ...


def _open_place(path: str, revision: str | None) -> _Place:
    """Raises InputError for what is no place, PipelineError for one that cannot be reached."""
    if is_hub_id(path) and not os.path.isdir(path):
        return _HubPlace(path, revision)
    return _FolderPlace(path)


class _FolderPlace:
    """A directory, here or remote."""

    def __init__(self, path: str) -> None:
        self.where = path
        with self._named_errors():
            self._filesystem, self._root = fsspec.core.url_to_fs(path)
        if "://" not in path and not os.path.isdir(path):
            raise InputError(f"{path:.300} is neither a directory nor a Hub id. Set model.tokenizer or model.path.")

    def read(self, name: str) -> bytes | None:
        file = f"{self._root.rstrip('/')}/{name}"
        with self._named_errors():
            try:
                info = self._filesystem.info(file)  # `exists` takes a place that it cannot reach for an empty one
                if info["type"] != "file":  # a named pipe would not end
                    raise InputError(f"{self.where}/{name} is not a regular file. Replace it by the tokenizer's file.")
                _check_size(f"{self.where}/{name}", info["size"])
                return self._filesystem.cat_file(file)
            except FileNotFoundError:
                return None

    def _named_errors(self) -> AbstractContextManager[None]:
        return named_errors(self.where, key=_KEY, invalid=InputError)


class _HubPlace:
    """A repository of the Hub, at one commit."""

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
