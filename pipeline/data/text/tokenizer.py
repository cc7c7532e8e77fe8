"""Converts text to token ids with the `tokenizers` library, as transformers' fast tokenizer does."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property

import jinja2
import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from pipeline.config.choices import SpecialTokens
from pipeline.core.errors import ConfigError, InputError
from pipeline.data.text.long_texts import PIECE_CHARACTERS, encode_in_pieces
from pipeline.data.text.templates import ChatTemplate, RenderError
from pipeline.data.text.tokenizer_files import read_tokenizer_files


class TextTokenizer:
    """Encodes documents and renders chats. Use `load_tokenizer`."""

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
        """Takes ownership of `tokenizer`. name: for messages. digest: identifies the tokenizer. chat: the source of its
        chat template. named_tokens: the tokens available to that template, such as bos_token.

        Raises InputError for a tokenizer that draws random numbers.
        """
        if dropout := getattr(tokenizer.model, "dropout", None):
            raise InputError(
                f"tokenizer {name} has a model with dropout={dropout}, which gives different ids in every run. Set its "
                "dropout to null."
            )
        # A tokenizer.json may contain truncation and padding settings from when it was saved.
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
        """The number of token ids, including added tokens."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def identity(self) -> dict[str, object]:
        """What determines the ids of a text, as plain JSON values."""
        return dict(self._identity)

    def encode(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        """The ids of each text: prefix, the tokenizer's ids, suffix.

        Raises ValueError for a text that cannot be tokenised: UnicodeEncodeError for a lone surrogate, IndivisibleText,
        or an error with the library's message.
        """
        short = [text for text in texts if len(text) <= PIECE_CHARACTERS]
        encodings = iter(self._library_ids(short, self._add_special_tokens))
        return [
            np.array([*self._prefix, *next(encodings), *self._suffix], np.int32)
            if len(text) <= PIECE_CHARACTERS
            else self._encode_long(text)
            for text in texts
        ]

    def _encode_long(self, text: str) -> Int32[np.ndarray, "_"]:
        ids = encode_in_pieces(lambda piece: self._library_ids([piece], add_special_tokens=False)[0], text)
        before, after = self._special_ids if self._add_special_tokens else ([], [])
        parts = ([*self._prefix, *before], ids, [*after, *self._suffix])
        return np.concatenate([np.asarray(part, np.int32) for part in parts])

    def _library_ids(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError:
            for text in texts:
                text.encode()
            raise
        except Exception as error:
            if type(error) is not Exception:
                raise
            # The library's only type of error, e.g. for an unknown word if the vocabulary has no unknown token.
            raise ValueError(f"the tokenizer refuses the text: {error}") from error
        return [encoding.ids for encoding in encodings]

    @cached_property
    def _special_ids(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer adds before and after every text."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        is_text = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
        first, last = (is_text[0], is_text[-1] + 1) if is_text else (len(encoding.ids), len(encoding.ids))
        return encoding.ids[:first], encoding.ids[last:]

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, "_"], *, skip_special_tokens: bool = False) -> str:
        """The text of the ids."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_id(self, key: str, text: str) -> int:
        """The id of a text that is a single token. Raises ConfigError, naming the setting `key`, if it is not one."""
        token_id = self._tokenizer.token_to_id(text)
        ids = [token_id] if token_id is not None else self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ConfigError(
                f"{key}={text!r} is {len(ids)} tokens for tokenizer {self._name}, expected one. "
                f"Give the text of a single token, or null."
            )
        return ids[0]

    def token_texts(self) -> dict[int, str]:
        """The text that each token adds to a preceding text, by id. (For a single token, decoders drop a leading
        space.)"""
        ids = list(self._tokenizer.get_vocab(with_added_tokens=True).values())
        once = self._tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
        twice = self._tokenizer.decode_batch([[i, i] for i in ids], skip_special_tokens=False)
        return {i: both[len(one) :] for i, one, both in zip(ids, once, twice, strict=True)}

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """Renders messages with the chat template, like transformers' `apply_chat_template(tokenize=False)`.

        Raises ConfigError if the tokenizer has no usable chat template, and RenderError, naming the template, if it
        cannot render these messages.
        """
        settings = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, **self._named_tokens}
        try:
            return self._template(settings)
        except RenderError as error:
            raise RenderError(f"the chat template of tokenizer {self._name} fails: {error}") from error

    def require_chat(self) -> None:
        """Raises ConfigError unless chats can be rendered, and tokenised without duplicate special tokens."""
        try:
            self.render_chat([{"role": "user", "content": "0"}], add_generation_prompt=True)
        except RenderError as error:
            raise ConfigError(f"{error}. Set data.template=plain, or correct the template.") from error
        if self._add_special_tokens and self._tokenizer.num_special_tokens_to_add(is_pair=False):
            raise ConfigError(
                f"data.special_tokens=tokenizer, but tokenizer {self._name} would add its special tokens to those of "
                "the chat template. Set data.special_tokens=none."
            )

    def chat_identity(self) -> str | None:
        """The sha256 of the chat template's source and its tokens, as hex; None without a chat template."""
        if self._chat is None:
            return None
        return hashlib.sha256(json.dumps([self._chat, self._named_tokens], sort_keys=True).encode()).hexdigest()

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._chat is None:
            raise ConfigError(
                f"tokenizer {self._name} has no chat template. Set data.template=plain or a different model.tokenizer."
            )
        try:
            return ChatTemplate(self._chat)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template of tokenizer {self._name} fails: {error}. Set data.template=plain, or "
                "correct the template."
            ) from error


def load_tokenizer(
    path: str,
    *,
    revision: str | None = None,
    special_tokens: SpecialTokens = SpecialTokens.tokenizer,
    prefix: str | None = None,
    suffix: str | None = None,
) -> TextTokenizer:
    """Loads tokenizer.json and the chat template from a directory, a remote path (`gs://...`) or a Hub id.

    Raises InputError if there is no valid tokenizer.json, ConfigError for a prefix or suffix that is not one token, and
    PipelineError if the path cannot be reached.
    """
    files = read_tokenizer_files(os.path.expanduser(path), revision)
    return TextTokenizer(
        files.tokenizer,
        name=path,
        digest=files.digest,
        special_tokens=special_tokens,
        prefix=prefix,
        suffix=suffix,
        chat=files.chat,
        named_tokens=files.named_tokens,
    )
