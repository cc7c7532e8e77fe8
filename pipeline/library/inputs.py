"""The inputs of an Extractor: texts, token ids and chats, as documents of one stream."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.choices import OnError
from pipeline.config.limits import shown
from pipeline.core.arguments import flag, items
from pipeline.core.errors import InputError
from pipeline.data.documents import Cursor, Document, SkippedDocument
from pipeline.data.text.templates import RenderError
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.data.tokenised import TokenisedDocument, TokenisedDocuments

Chat = Sequence[Mapping[str, str]]
DocumentInput = str | Sequence[int] | np.ndarray | Chat

_NAME = "documents"  # the only source shard's name in messages
_PARQUET_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string())])
_ROW_GROUP = 1000  # documents


@dataclass(frozen=True)
class DocumentReader:
    """Tokenises documents. on_error: whether a bad document raises an error or is skipped."""

    tokenizer: TextTokenizer
    vocab_size: int
    on_error: OnError
    add_generation_prompt: bool

    def __post_init__(self) -> None:
        flag("add_generation_prompt", self.add_generation_prompt)

    def texts(self, documents: Sequence[DocumentInput], *, with_tokens: bool) -> "Texts":
        """The texts and rendered chats among the documents. with_tokens: whether token lists are allowed, too.

        Raises InputError for anything else, and ConfigError for a chat if the tokenizer has no usable template.
        """
        if any(map(_is_chat, documents)):
            self.tokenizer.require_chat()
        items = []
        for index, document in enumerate(documents):
            if isinstance(document, str):
                items.append(self._text(index, lambda text=document: text))
            elif _is_chat(document):
                items.append(self._text(index, lambda chat=document: self._rendered(chat)))
            elif not (with_tokens and _is_tokens(document)):
                tokens = "a list of token ids, " if with_tokens else ""
                raise InputError(
                    f"{_NAME}[{index}] is {shown(document)}. Expected a text, {tokens}or a chat: a list of messages "
                    "such as {'role': 'user', 'content': '...'}."
                )
        return Texts(tuple(items))

    def tokenised(self, documents: Sequence[DocumentInput]) -> list[TokenisedDocument | SkippedDocument]:
        """Every document's tokens, in order.

        Raises InputError, naming the document, for one without tokens or with tokens outside the model's vocabulary,
        unless `on_error` skips it.
        """
        texts = self.texts(documents, with_tokens=True)
        given = {index: np.asarray(tokens) for index, tokens in enumerate(documents) if _is_tokens(tokens)}
        tokenised = TokenisedDocuments(
            texts, self.tokenizer, [0], on_error=self.on_error, vocab_size=self.vocab_size
        ).read(Cursor())
        by_index = {index: self._checked(index, tokens) for index, tokens in given.items()}
        for item in tokenised:
            by_index[item.index if isinstance(item, SkippedDocument) else item.document.index] = item
        return [by_index[index] for index in range(len(documents))]

    def _rendered(self, chat: Chat) -> str:
        return self.tokenizer.render_chat(chat, add_generation_prompt=self.add_generation_prompt)

    def _text(self, index: int, make: Callable[[], str]) -> Document | SkippedDocument:
        try:
            text = make()
        except RenderError as error:
            return self._bad(index, str(error))
        if not text:
            return self._bad(index, "the text is empty")
        try:
            text.encode()
        except UnicodeEncodeError:
            return self._bad(index, "the text has a lone surrogate, so is not UTF-8")
        return Document(str(index), text, _NAME, index)

    def _checked(self, index: int, tokens: np.ndarray) -> TokenisedDocument | SkippedDocument:
        if not len(tokens):
            return self._bad(index, "it has no tokens")
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= self.vocab_size:
            wrong = smallest if smallest < 0 else largest
            return self._bad(index, f"token id {wrong} is outside the model's vocabulary of {self.vocab_size}")
        return TokenisedDocument(Document(str(index), "", _NAME, index), tokens.astype(np.int32), Cursor())

    def _bad(self, index: int, reason: str) -> SkippedDocument:
        if self.on_error is OnError.fail:
            raise InputError(f"{_NAME}[{index}]: {reason}. Correct it, or set on_error='skip' for an empty result.")
        return SkippedDocument(_NAME, index, reason)


@dataclass(frozen=True)
class Texts:
    """Texts in memory as a source with one source shard."""

    items: tuple[Document | SkippedDocument, ...]
    shards: ClassVar = (_NAME,)
    info_schema: ClassVar = pa.schema([])

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        return (item for item in self.items if item.index >= start)

    def fingerprint(self) -> dict[str, object]:
        return {"texts": [item.text if isinstance(item, Document) else None for item in self.items]}

    def write(self, folder: str, ids: Iterable[str] | None) -> str:
        """Writes a parquet file with the columns id and text, and returns its path. The file name depends on the
        content, so that stores of different texts have different fingerprints. ids: None for the documents' numbers.

        Raises InputError if the number of ids differs from the number of documents.
        """
        given = [item.index for item in self.items] if ids is None else items("ids", ids, "a list of strings")
        names = list(map(str, given))
        if len(names) != len(self.items):
            raise InputError(f"ids has {len(names)} entries for {len(self.items)} documents. Give one id per document.")
        texts = [item.text if isinstance(item, Document) else "" for item in self.items]  # the command skips empty ones
        digest = hashlib.sha256(json.dumps([names, texts]).encode()).hexdigest()
        path = os.path.join(folder, f"texts-{digest[:16]}.parquet")
        table = pa.table({"id": names, "text": texts}, schema=_PARQUET_SCHEMA)
        pq.write_table(table, path, compression="none", row_group_size=_ROW_GROUP)
        return path


class GivenDocuments:
    """Tokenised documents in memory, as the documents of a stream."""

    num_shards = 1
    info_schema = pa.schema([])

    def __init__(self, documents: Iterable[TokenisedDocument]) -> None:
        self._documents = [
            replace(document, cursor=Cursor(0, number, 0, number)) for number, document in enumerate(documents)
        ]

    def read(self, start: Cursor, should_stop: Callable[[], bool] = lambda: False) -> Iterator[TokenisedDocument]:
        return iter(self._documents[start.ordinal :])


def as_list(documents: Iterable[DocumentInput]) -> list[DocumentInput]:
    """The documents as a list. Raises InputError for a single document."""
    if isinstance(documents, str | Mapping) or not isinstance(documents, Iterable) or _is_chat(documents):
        raise InputError(
            f"documents is {shown(documents)}. Expected a list of texts, token lists or chats. For a single document, "
            "give [document]."
        )
    return list(documents)


def _is_chat(document: object) -> bool:
    return isinstance(document, list | tuple) and bool(document) and all(isinstance(part, Mapping) for part in document)


def _is_tokens(document: object) -> bool:
    """Whether a document is a one-dimensional array or list of integers."""
    if isinstance(document, str | Mapping) or not isinstance(document, Iterable):
        return False
    try:
        array = np.asarray(document)
    except ValueError:
        return False
    return array.ndim == 1 and (array.size == 0 or np.issubdtype(array.dtype, np.integer))
