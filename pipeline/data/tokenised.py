"""Reads the documents of one stream, in order and with their token ids, from any cursor on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
from jaxtyping import Int32

from pipeline.config.choices import LongPrompts, OnError
from pipeline.core.errors import InputError
from pipeline.data.documents import Cursor, Document, SkippedDocument, Source
from pipeline.data.text.tokenizer import TextTokenizer

# Documents tokenised together: enough for the tokenizer's threads, but not so many that a block waits for them.
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 20
_REASON_CHARACTERS = 1000
_LONE_SURROGATE = "{} has a lone surrogate, so is not UTF-8"


@dataclass(frozen=True, slots=True)
class TokenisedDocument:
    """A document, its tokens, and the cursor of its first token. num_cut: the tokens that were cut from it."""

    document: Document
    tokens: Int32[np.ndarray, "_"]
    cursor: Cursor
    num_cut: int = 0


class StreamDocuments(Protocol):
    """The documents of one stream. info_schema: the names and types of the columns of `Document.info`."""

    num_shards: int  # the number of the stream's source shards
    info_schema: pa.Schema

    def read(
        self, start: Cursor, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[TokenisedDocument | SkippedDocument]:
        """The documents from `start.document` on. The caller handles `start.token`.

        May end at any document once `should_stop` returns true, which it must then continue to do.
        """


class TokenisedDocuments:
    """Tokenises the documents of some source shards in batches.

    shards: indices into `source.shards`. Neither token ids nor errors depend on which documents share a batch.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: TextTokenizer,
        shards: Sequence[int],
        *,
        on_error: OnError,
        vocab_size: int | None,
        max_prompt: int | None = None,
        long_prompts: LongPrompts = LongPrompts.refuse,
    ) -> None:
        """vocab_size: the model's; None accepts every token id. max_prompt: longer prompts are cut or refused."""
        self.num_shards = len(shards)
        self.info_schema = source.info_schema
        self._source = source
        self._tokenizer = tokenizer
        self._shards = shards
        self._on_error = on_error
        self._vocab_size = vocab_size
        self._max_prompt = max_prompt
        self._long_prompts = long_prompts

    def read(
        self, start: Cursor, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[TokenisedDocument | SkippedDocument]:
        """See `StreamDocuments`. Raises InputError, naming file and row, for a document that cannot be tokenised,
        unless these are skipped."""
        ordinal = start.ordinal
        for batch in _batches(self._rows(start, should_stop)):
            results = iter(self._encode([item.text for _, item in batch if isinstance(item, Document)]))
            for shard, item in batch:
                if isinstance(item, SkippedDocument):
                    yield replace(item, reason=_storable(item.reason))
                    continue
                result = next(results)
                if reason := result if isinstance(result, str) else _unicode_problem(item):
                    yield self._bad(item, _storable(reason))
                else:
                    kept = self._cut(result)
                    num_cut = len(result) - len(kept)
                    yield TokenisedDocument(item, kept, Cursor(shard, item.index, 0, ordinal), num_cut)
                    ordinal += 1

    def _rows(self, start: Cursor, should_stop: Callable[[], bool]) -> Iterator[tuple[int, Document | SkippedDocument]]:
        """The source's rows from `start` on, each with the index of its source shard in the stream."""
        for shard in range(start.shard, len(self._shards)):
            for item in self._source.read(self._shards[shard], start.document if shard == start.shard else 0):
                if should_stop():
                    return
                yield shard, item

    def _encode(self, texts: list[str]) -> list[Int32[np.ndarray, "_"] | str]:
        """The tokens of each text, or the reason why it cannot be used."""
        try:
            return [self._checked(tokens) for tokens in self._tokenizer.encode(texts)]
        except ValueError as error:
            if len(texts) > 1:
                return [tokens for text in texts for tokens in self._encode([text])]
            return [_LONE_SURROGATE.format("the text") if isinstance(error, UnicodeEncodeError) else str(error)]

    def _checked(self, tokens: Int32[np.ndarray, "_"]) -> Int32[np.ndarray, "_"] | str:
        if not len(tokens):
            return "the tokenizer gives no token for the text"
        if self._vocab_size is not None and (largest := int(tokens.max())) >= self._vocab_size:
            return f"token id {largest} is outside the model's vocabulary of {self._vocab_size}"
        if self._long_prompts is LongPrompts.refuse and self._max_prompt and len(tokens) > self._max_prompt:
            return f"the prompt has {len(tokens)} tokens, more than data.prompt_length={self._max_prompt}"
        return tokens

    def _cut(self, tokens: Int32[np.ndarray, "_"]) -> Int32[np.ndarray, "_"]:
        """At most `max_prompt` tokens: those that precede every text (BOS, the prefix), and the last ones."""
        num_cut = len(tokens) - (self._max_prompt or len(tokens))
        if num_cut <= 0:
            return tokens
        before = self._tokenizer.encode([""])[0][: self._max_prompt - 1]
        num_before = int(np.cumprod(before == tokens[: len(before)]).sum())
        return np.concatenate([tokens[:num_before], tokens[num_before + num_cut :]])

    def _bad(self, document: Document, reason: str) -> SkippedDocument:
        return SkippedDocument(document.source, document.index, reason).if_allowed(
            self._on_error,
            f"{document.source} row {document.index} (id {_storable(document.id)})",
            "Repair the data, check that the tokenizer belongs to the model",
        )


def _batches(
    rows: Iterable[tuple[int, Document | SkippedDocument]],
) -> Iterator[list[tuple[int, Document | SkippedDocument]]]:
    """Batches for the tokenizer. If a row raises InputError, the documents before it are yielded first."""
    batch: list[tuple[int, Document | SkippedDocument]] = []
    characters = 0
    try:
        for shard, item in rows:
            batch.append((shard, item))
            characters += len(item.text) if isinstance(item, Document) else 0
            if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    except InputError:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _unicode_problem(document: Document) -> str | None:
    """Why the document's id or a column of its info cannot be stored; None if they can."""
    for name, value in (("id", document.id), *document.info.items()):
        try:
            str(value).encode()
        except UnicodeEncodeError:
            return _LONE_SURROGATE.format(f"its {name}")
    return None


def _storable(reason: str) -> str:
    """A message, which may quote any text, with limited length and without lone surrogates."""
    return reason[:_REASON_CHARACTERS].encode(errors="backslashreplace").decode()
