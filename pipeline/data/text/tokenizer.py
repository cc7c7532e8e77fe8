"""Converts text to token ids with the `tokenizers` library, as transformers' fast tokenizer does."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from pipeline.config.choices import SpecialTokens
from pipeline.core.errors import ConfigError, InputError
from pipeline.data.text.templates import ChatTemplate, RenderError
from pipeline.data.text.tokenizer_files import read_tokenizer_files
from pipeline.data.text.tokenizer_settings import is_from_tokenizers, library_errors

MAX_CHARACTERS = 1 << 23  # of a text: the library takes 100 to 500 bytes for each


class TextTokenizer:
    """Encodes documents, and has the chat templates. Use `load_tokenizer`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        name: str,
        digest: str,
        special_tokens: SpecialTokens = SpecialTokens.tokenizer,
        prefix: str | None = None,
        suffix: str | None = None,
        chat: ChatTemplate | None = None,
        chat_with_tools: ChatTemplate | None = None,
    ) -> None:
        """Takes ownership of `tokenizer`. name: for messages. digest: identifies the tokenizer. chat_with_tools: for
        conversations that come with tools; None if `chat` is.

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
        self.name = name
        self.named: Mapping[str, str] = {}  # the texts of `bos_token` and others
        self._chat = chat
        self._chat_with_tools = chat_with_tools
        self._prefix = [] if prefix is None else [self.token_id("data.prefix", prefix)]
        self._suffix = [] if suffix is None else [self.token_id("data.suffix", suffix)]
        adds = special_tokens is SpecialTokens.tokenizer
        with library_errors(f"tokenizer {name} cannot be used"):
            self._before, self._after = _added_ids(tokenizer, name) if adds else ([], [])
            added = tokenizer.get_added_tokens_decoder().items()
        self._special = {*self._before, *self._after, *(number for number, token in added if token.special)}
        tokenizer.post_processor = None  # it may leave spaces out of the offsets
        self._identity = {"sha256": digest, "special_tokens": str(special_tokens), "prefix": prefix, "suffix": suffix}

    def require_ends(self, adds: Mapping[str, tuple[str, bool]]) -> None:
        """Raises InputError if tokenizer_config.json claims that a token is added to every text, and it is not, or the
        opposite: versions of transformers differ in which they believe. adds: the claims, by attribute."""
        for name, (text, is_added) in adds.items():
            ends = self._before if name == "add_bos_token" else self._after
            if is_added != (self._tokenizer.token_to_id(text) in ends):
                raise InputError(
                    f"tokenizer {self.name}: tokenizer_config.json has {name}={str(is_added).lower()}, but with "
                    f"tokenizer.json {text} is {'not ' * is_added}added to a text. Correct one of them, or set "
                    "data.special_tokens=none, with data.prefix or data.suffix for a token that should be added."
                )

    @property
    def vocab_size(self) -> int:
        """The number of token ids, including added tokens."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def padding(self) -> int | None:
        """The id that no text has several of at an end; None if there is none."""
        padding = self.named.get("pad_token")
        return None if padding is None else self._tokenizer.token_to_id(padding)

    def text_of(self, token: int | str) -> str:
        """The text of a token id, or of `bos`, `eos` or `sep`, as SAELens names them: EOS stands for a missing BOS.
        Raises ConfigError if there is none."""
        if isinstance(token, int):
            text = self._tokenizer.id_to_token(token)
        else:
            names = [f"{token}_token", *(["eos_token"] if token == "bos" else [])]
            text = next(filter(None, map(self.named.get, names)), None)
        if text is None:
            raise ConfigError(f"tokenizer {self.name} has no token {token}. Set batch.contexts=given.")
        return text

    def identity(self) -> dict[str, object]:
        """What determines the ids of a text, as plain JSON values."""
        return dict(self._identity)

    @property
    def ends(self) -> tuple[Int32[np.ndarray, "_"], Int32[np.ndarray, "_"]]:
        """The ids that are put before and after every text."""
        pairs = (self._prefix, self._before), (self._after, self._suffix)
        before, after = (self._merged(*(_added(ids, 1) for ids in pair))[:, 0] for pair in pairs)
        return before, after

    def encode(self, texts: Sequence[str], *, with_ends: bool = True) -> list[Int32[np.ndarray, "_"]]:
        """The ids of each text: prefix, the tokenizer's ids, suffix. Without ends, only those of the text itself.

        A special token that would be put beside itself, e.g. BOS before a text that begins with it, is put once.

        Raises ValueError for a text that cannot be tokenised: UnicodeEncodeError for a lone surrogate, or an error that
        says why.
        """
        encoded = self.encode_with_starts(texts, with_ends=with_ends, has_starts=False)
        return [np.ascontiguousarray(tokens[:, 0]) for tokens in encoded]

    def encode_with_starts(
        self, texts: Sequence[str], *, with_ends: bool = True, has_starts: bool = True
    ) -> list[Int32[np.ndarray, "_ columns"]]:
        """As `encode`, with a second column, unless `has_starts` is false: the place in the text of each token's first
        character, or -1 for what is put before and after the text."""
        encoded = self._tokens(texts, has_starts)
        return [self._completed(tokens) for tokens in encoded] if with_ends else encoded

    def _completed(self, tokens: Int32[np.ndarray, "_ columns"]) -> Int32[np.ndarray, "_ columns"]:
        """The tokens of a text, between those that are put before and after every text."""
        before, after = (self._prefix, self._before), (self._after, self._suffix)
        before, after = ([_added(ids, tokens.shape[1]) for ids in parts] for parts in (before, after))
        return self._merged(*before, tokens, *after)

    def _merged(self, *parts: Int32[np.ndarray, "_ columns"]) -> Int32[np.ndarray, "_ columns"]:
        """The tokens of all parts, one after another; special ones that two neighbours share are put once."""
        whole = parts[0]
        for part in parts[1:]:
            for size in range(min(len(whole), len(part)), 0, -1):
                ids = part[:size, 0]
                if np.array_equal(whole[-size:, 0], ids) and self._special.issuperset(ids.tolist()):
                    whole[-size:] = np.maximum(whole[-size:], part[:size])  # the text's own has a place in it
                    part = part[size:]
                    break
            whole = np.concatenate([whole, part])
        return whole

    def _tokens(self, texts: Sequence[str], has_starts: bool = False) -> list[Int32[np.ndarray, "_ columns"]]:
        """The ids of each text, without special tokens, and in a second column the places of `encode_with_starts`."""
        if (longest := max(map(len, texts), default=0)) > MAX_CHARACTERS:
            raise ValueError(f"it has {longest:,} characters, expected at most {MAX_CHARACTERS:,}: divide the document")
        encode = self._tokenizer.encode_batch if has_starts else self._tokenizer.encode_batch_fast
        try:
            encodings = encode(texts, add_special_tokens=False)
        except TypeError:
            for text in texts:
                text.encode()
            raise
        except BaseException as error:
            if not is_from_tokenizers(error):
                raise
            # E.g. for an unknown word if the vocabulary has no unknown token.
            raise ValueError(f"the tokenizer refuses the text: {error!s:.300}") from error
        if not has_starts:
            return [np.array(encoding.ids, np.int32)[:, None] for encoding in encodings]
        starts = ([first for first, _ in encoding.offsets] for encoding in encodings)
        return [np.array([item.ids, first], np.int32).T.copy() for item, first in zip(encodings, starts, strict=True)]

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, "_"], *, skip_special_tokens: bool = False) -> str:
        """The text of the ids. Raises InputError for ids that the tokenizer cannot decode."""
        with library_errors(f"tokenizer {self.name} cannot decode these ids"):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_id(self, key: str, text: str) -> int:
        """The id of a text that is a single token. Raises ConfigError, naming the setting `key`, if it is not one."""
        token_id = self._tokenizer.token_to_id(text)
        with library_errors(f"tokenizer {self.name} cannot tokenise {key}={text!r:.100}"):
            ids = [token_id] if token_id is not None else self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ConfigError(
                f"{key}={text!r} is {len(ids)} tokens for tokenizer {self.name}, expected one. "
                f"Give the text of a single token, or null."
            )
        return ids[0]

    def token_texts(self) -> dict[int, str]:
        """The text that each token adds to a preceding text, by id. (For a single token, decoders drop a leading
        space.)"""
        ids = list(self._tokenizer.get_vocab(with_added_tokens=True).values())
        with library_errors(f"tokenizer {self.name} cannot decode its tokens"):
            once = self._tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
            twice = self._tokenizer.decode_batch([[i, i] for i in ids], skip_special_tokens=False)
        return {i: both[len(one) :] for i, one, both in zip(ids, once, twice, strict=True)}

    def chat(self, tools: Sequence[Mapping[str, Any]] | None = None) -> ChatTemplate:
        """The chat template for conversations with these tools. Raises ConfigError without one."""
        chat = self._chat if tools is None else self._chat_with_tools or self._chat
        if chat is None:
            raise ConfigError(
                f"tokenizer {self.name} has no chat template. Set data.template=plain or a different model.tokenizer."
            )
        return chat

    def require_chat(self) -> None:
        """Raises ConfigError unless chats can be rendered, and tokenised without special tokens that the template does
        not write."""
        try:
            text = self.chat().render([{"role": "user", "content": "0"}], add_generation_prompt=True)
        except RenderError as error:
            raise ConfigError(f"{error}. Set data.template=plain, or correct the template.") from error
        ids = self._tokens([text])[0][:, 0].tolist()
        writes = ids[: len(self._before)] == self._before and ids[len(ids) - len(self._after) :] == self._after
        if (self._before or self._after) and not writes:
            raise ConfigError(
                f"data.special_tokens=tokenizer, but tokenizer {self.name} would add its special tokens to those of "
                "the chat template. Set data.special_tokens=none."
            )

    def chat_identity(self) -> dict[str, object]:
        """What determines a rendered chat, as plain JSON values; {} without a chat template."""
        identity = {} if self._chat is None else self._chat.identity()
        return identity | ({"with_tools": self._chat_with_tools.identity()} if self._chat_with_tools else {})


def _added(ids: Sequence[int], columns: int) -> Int32[np.ndarray, "_ columns"]:
    """Tokens that have no place in a text."""
    return np.array([[i, -1] for i in ids], np.int32).reshape(-1, 2)[:, :columns]


def _added_ids(tokenizer: Tokenizer, name: str) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after every text. Raises InputError if it also adds some elsewhere."""
    if tokenizer.post_processor is None:
        return [], []
    for text in ("a", *islice(tokenizer.get_vocab(with_added_tokens=False), 100)):
        with suppress(Exception):  # a tokenizer without an unknown token refuses other texts
            encoding = tokenizer.encode(text, add_special_tokens=True)
            is_text = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
            before, after = encoding.ids[: is_text[0]], encoding.ids[is_text[-1] + 1 :]
            if encoding.ids == [*before, *tokenizer.encode(text, add_special_tokens=False).ids, *after]:
                return before, after
    raise InputError(
        f"tokenizer {name} has a post_processor that does not only put tokens before and after a text. Set "
        "data.special_tokens=none."
    )


def load_tokenizer(
    path: str,
    *,
    revision: str | None = None,
    special_tokens: SpecialTokens = SpecialTokens.tokenizer,
    prefix: str | None = None,
    suffix: str | None = None,
    date: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> TextTokenizer:
    """Loads tokenizer.json, tokenizer_config.json and the chat template from a directory, a remote path (`gs://...`) or
    a Hub id. date, template_kwargs: for the chat template, as in the configuration.

    Raises InputError if there is no valid tokenizer.json, ConfigError for a prefix or suffix that is not one token, and
    PipelineError if the path cannot be reached.
    """
    if not isinstance(template_kwargs or {}, Mapping):
        raise ConfigError(
            f"data.template_kwargs is {template_kwargs!r:.100}, expected values by name: {{enable_thinking: false}}."
        )
    files = read_tokenizer_files(os.path.expanduser(path), revision)
    templates = {
        name: ChatTemplate(source, path, named_tokens=files.named_tokens, variables=template_kwargs, date=date)
        for name, source in files.templates.items()
    }
    has_tools = (template_kwargs or {}).get("tools") is not None
    tokenizer = TextTokenizer(
        files.tokenizer,
        name=path,
        digest=files.digest,
        special_tokens=special_tokens,
        prefix=prefix,
        suffix=suffix,
        chat=(has_tools and templates.get("tool_use")) or templates.get("default"),
        chat_with_tools=None if has_tools else templates.get("tool_use"),
    )
    tokenizer.named = files.named_tokens
    if special_tokens is SpecialTokens.tokenizer:
        tokenizer.require_ends(files.adds)
    return tokenizer
