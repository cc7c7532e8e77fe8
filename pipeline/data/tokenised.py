"""Reads the documents of one stream, in order and with their token ids, from any cursor on."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int, Int16, Int32, Int64

from pipeline.config.choices import LongPrompts, OnError
from pipeline.core.errors import InputError
from pipeline.data.documents import MASK, Cursor, Document, SkippedDocument, Source
from pipeline.data.text.contexts import NOTHING, Added
from pipeline.data.text.labels import Label, Part, Role
from pipeline.data.text.tokenizer import TextTokenizer

log = logging.getLogger("pipeline")

# Documents tokenised together: enough for the tokenizer's threads, but not so many that a block waits for them.
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 20
_REASON_CHARACTERS = 1000
# The labels of tokens that are put before and after a text.
ADDED = {Label.message: -1, Label.role: Role.none, Label.part: Part.markup, Label.written: 0}
LONE_SURROGATE = "{} has a lone surrogate, so is not UTF-8"

Encoded = tuple[Int32[np.ndarray, "_"], Int16[np.ndarray, "_ 5"] | None]  # tokens and their labels


@dataclass(frozen=True, slots=True)
class TokenisedDocument:
    """A document, its tokens, and the cursor of its first token. num_cut: the tokens that were cut from it. labels: of
    the tokens, in the order of `Label`; a token has those of its first character."""

    document: Document
    tokens: Int32[np.ndarray, "_"]
    cursor: Cursor
    num_cut: int = 0
    labels: Int16[np.ndarray, "_ 5"] | None = None


class StreamDocuments(Protocol):
    """The documents of one stream. info_schema: the names and types of the columns of `Document.info`. added: what
    windows and rows add to their tokens."""

    num_shards: int  # the number of the stream's source shards
    info_schema: pa.Schema
    added: Added

    def read(
        self, start: Cursor, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[TokenisedDocument | SkippedDocument]:
        """The documents from `start.document` on. The caller handles `start.token`.

        May end at any document once `should_stop` returns true, which it must then continue to do.
        """


@dataclass
class TokenisedDocuments:
    """Tokenises the documents of some source shards in batches.

    tokenizer: None if all documents have tokens. shards: indices into `source.shards`. vocab_size: the model's; None
    accepts every token id. added: see `open_added`. max_prompt: longer prompts are cut or refused. Neither token ids
    nor errors depend on which documents share a batch.
    """

    source: Source
    tokenizer: TextTokenizer | None
    shards: Sequence[int]
    _: KW_ONLY
    on_error: OnError
    vocab_size: int | None
    added: Added = NOTHING
    max_prompt: int | None = None
    long_prompts: LongPrompts = LongPrompts.refuse
    _has_checked_first: bool = field(default=False, init=False)

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    @property
    def info_schema(self) -> pa.Schema:
        return self.source.info_schema

    def read(
        self, start: Cursor, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[TokenisedDocument | SkippedDocument]:
        """See `StreamDocuments`. Raises InputError, naming file and row, for a document that cannot be tokenised,
        unless these are skipped."""
        ordinal = start.ordinal
        for batch in _batches(self._rows(start, should_stop)):
            texts = [item for _, item in batch if isinstance(item, Document) and item.tokens is None]
            results = iter(self._encode(texts) if texts else [])
            for shard, item in batch:
                if isinstance(item, SkippedDocument):
                    yield replace(item, reason=_storable(item.reason))
                    continue
                ids = item.tokens
                result = next(results) if ids is None else self._problem(ids, is_given=True) or (ids, None)
                if reason := result if isinstance(result, str) else _unicode_problem(item):
                    yield self._bad(item, _storable(reason))
                else:
                    tokens, labels = result
                    kept = self._cut(tokens)
                    num_cut = len(tokens) - len(kept)
                    yield TokenisedDocument(item, kept, Cursor(shard, item.index, 0, ordinal), num_cut, labels)
                    ordinal += 1

    def _rows(self, start: Cursor, should_stop: Callable[[], bool]) -> Iterator[tuple[int, Document | SkippedDocument]]:
        """The source's rows from `start` on, each with the index of its source shard in the stream."""
        for shard in range(start.shard, len(self.shards)):
            for item in self.source.read(self.shards[shard], start.document if shard == start.shard else 0):
                if should_stop():
                    return
                yield shard, item

    def _encode(self, documents: list[Document]) -> list[Encoded | str]:
        """The tokens of each document and their labels, or the reason why it cannot be used."""
        try:
            results = encoded(self.tokenizer, documents, with_ends=self.added.separator is None)
            return [self._problem(tokens) or (tokens, labels) for tokens, labels in results]
        except ValueError as error:
            if len(documents) > 1:
                return [result for document in documents for result in self._encode([document])]
            return [LONE_SURROGATE.format("the text") if isinstance(error, UnicodeEncodeError) else str(error)]

    def _problem(self, tokens: Int32[np.ndarray, "_"], is_given: bool = False) -> str | None:
        """Why the tokens cannot be used; None if they can. is_given: they are from a column of the data."""
        if not len(tokens):
            return "the tokenizer gives no token for the text"
        if self.vocab_size is not None and (largest := int(tokens.max())) >= self.vocab_size:
            return f"token id {largest} is outside the model's vocabulary of {self.vocab_size}"
        if self.long_prompts is LongPrompts.refuse and self.max_prompt and len(tokens) > self.max_prompt:
            return f"the prompt has {len(tokens)} tokens, more than data.prompt_length={self.max_prompt}"
        if is_given and (problem := self.added.problem(tokens)):
            return problem
        if is_given and self.tokenizer is not None:
            if not self._has_checked_first:
                self._has_checked_first = True
                _warn_without_start(tokens, self.tokenizer)
            return _padding_problem(tokens, self.tokenizer.padding)
        return None

    def _cut(self, tokens: Int32[np.ndarray, "_"]) -> Int32[np.ndarray, "_"]:
        """At most `max_prompt` tokens: those that precede every text (BOS, the prefix), and the last ones."""
        num_cut = len(tokens) - (self.max_prompt or len(tokens))
        if num_cut <= 0:
            return tokens
        before = self.tokenizer.encode([""])[0][: self.max_prompt - 1]
        num_before = int(np.cumprod(before == tokens[: len(before)]).sum())
        return np.concatenate([tokens[:num_before], tokens[num_before + num_cut :]])

    def _bad(self, document: Document, reason: str) -> SkippedDocument:
        return SkippedDocument(document.source, document.index, reason).if_allowed(
            self.on_error,
            f"{document.source} row {document.index} (id {_storable(document.id)})",
            "Repair the data, check that the tokenizer belongs to the model",
        )


def encoded(tokenizer: TextTokenizer, documents: Sequence[Document], *, with_ends: bool = True) -> list[Encoded]:
    """The tokens of each document and, if it has labels, those of the tokens. with_ends: as in `TextTokenizer.encode`.
    Raises ValueError, as the tokenizer does."""
    texts = [document.text for document in documents]
    if all(document.labels is None for document in documents):
        return [(tokens, None) for tokens in tokenizer.encode(texts, with_ends=with_ends)] if texts else []
    results: list[Encoded] = []
    for document, tokens in zip(documents, tokenizer.encode_with_starts(texts, with_ends=with_ends), strict=True):
        starts, labels = tokens[:, 1], None
        if document.labels is not None:
            labels = _with_added(document.labels.at(_places_before(starts, starts >= 0)), starts < 0)
        results.append((np.ascontiguousarray(tokens[:, 0]), labels))
    return results


def labels_at(labels: Int16[np.ndarray, "n 5"], places: Int64[np.ndarray, " m"]) -> Int16[np.ndarray, "m 5"]:
    """The labels of the tokens at `places` of a document; from n on, these are added tokens."""
    is_own = places < len(labels)
    return _with_added(labels[_places_before(places, is_own)], ~is_own)


def _places_before(places: Int[np.ndarray, " n"], is_own: Bool[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """The places, and for tokens that are not a text's own the last one before, whose exchange they have."""
    return np.maximum.accumulate(np.where(is_own, places, 0))


def _with_added(labels: Int16[np.ndarray, "n 5"], is_added: Bool[np.ndarray, " n"]) -> Int16[np.ndarray, "n 5"]:
    for column, value in ADDED.items():
        labels[is_added, column] = value
    return labels


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


def _padding_problem(tokens: Int32[np.ndarray, "_"], padding: int | None) -> str | None:
    """Why the ids cannot be a text, if several at an end are the tokenizer's `padding`; None if they can."""
    if padding is None or len(tokens) < 2 or padding not in (tokens[0], tokens[-1]):
        return None
    is_padded = any((part == padding).all() for part in (tokens[:2], tokens[-2:]))
    return f"it has padding (token id {padding}) without a column {MASK!r} that is 0 there" if is_padded else None


def _warn_without_start(tokens: Int32[np.ndarray, "_"], tokenizer: TextTokenizer) -> None:
    """Warns if the ids do not begin like the documents of the tokenizer."""
    before = tokenizer.ends[0]
    if not np.array_equal(tokens[: len(before)], before):
        log.warning(
            "the first document's token ids begin with %d, but tokenizer %s puts %s before every text. They are used "
            "as they are",
            *(tokens[0], tokenizer.name, before.tolist()),
        )


def _unicode_problem(document: Document) -> str | None:
    """Why the document's id or a column of its info cannot be stored; None if they can."""
    for name, value in (("id", document.id), *document.info.items()):
        try:
            str(value).encode()
        except UnicodeEncodeError:
            return LONE_SURROGATE.format(f"its {name}")
    return None


def _storable(reason: str) -> str:
    """A message, which may quote any text, with limited length and without lone surrogates."""
    return reason[:_REASON_CHARACTERS].encode(errors="backslashreplace").decode()
