"""The inputs of an Extractor: texts, token ids and chats."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from pipeline.data.tokenised import TokenisedDocument

Chat = Sequence[Mapping[str, str]]
DocumentInput = str | Sequence[int] | np.ndarray | Chat

_NAME = "documents"  # the source in messages
_PARQUET_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string())])
_ROW_GROUP = 1000  # documents


@dataclass(frozen=True)
class DocumentReader:
    """Renders chats and tokenises texts. on_error: whether a bad document raises InputError or is skipped."""

    tokenizer: TextTokenizer
    vocab_size: int
    on_error: OnError
    add_generation_prompt: bool

    def __post_init__(self) -> None:
        flag("add_generation_prompt", self.add_generation_prompt)

    def texts(self, documents: Sequence[DocumentInput]) -> list[str | SkippedDocument]:
        """The texts, and the rendered chats. Raises InputError for anything else, and ConfigError for a chat if the
        tokenizer has no usable template."""
        if any(map(_is_chat, documents)):
            self.tokenizer.require_chat()
        return [self._text(index, document, "a text, or") for index, document in enumerate(documents)]

    def tokenised(self, documents: Sequence[DocumentInput]) -> list[TokenisedDocument | SkippedDocument]:
        """Every document's tokens, in order; token ids are used unchanged. A document without tokens, or with tokens
        outside the model's vocabulary, is a bad one."""
        if any(map(_is_chat, documents)):
            self.tokenizer.require_chat()
        expected = "a text, a list of token ids, or"
        read: list[str | SkippedDocument | np.ndarray] = [
            np.asarray(document) if _is_tokens(document) else self._text(index, document, expected)
            for index, document in enumerate(documents)
        ]
        encoded = iter(self._encoded([text for text in read if isinstance(text, str)]))
        with_tokens = [next(encoded) if isinstance(item, str) else item for item in read]
        return [
            item if isinstance(item, SkippedDocument) else self._checked(index, item)
            for index, item in enumerate(with_tokens)
        ]

    def _text(self, index: int, document: DocumentInput, expected: str) -> str | SkippedDocument:
        if not isinstance(document, str) and not _is_chat(document):
            raise InputError(
                f"{_NAME}[{index}] is {shown(document)}. Expected {expected} a chat: a list of messages such as "
                "{'role': 'user', 'content': '...'}."
            )
        try:
            text = document
            if not isinstance(document, str):
                text = self.tokenizer.render_chat(document, add_generation_prompt=self.add_generation_prompt)
            text.encode()
        except RenderError as error:
            return self._bad(index, str(error))
        except UnicodeEncodeError:
            return self._bad(index, "the text has a lone surrogate, so is not UTF-8")
        return text or self._bad(index, "the text is empty")

    def _encoded(self, texts: list[str]) -> list[np.ndarray | str]:
        """The tokens of each text, or why it cannot be tokenised."""
        try:
            return self.tokenizer.encode(texts)
        except ValueError as error:
            return [str(error)] if len(texts) == 1 else [tokens for text in texts for tokens in self._encoded([text])]

    def _checked(self, index: int, tokens: np.ndarray | str) -> TokenisedDocument | SkippedDocument:
        if isinstance(tokens, str):
            return self._bad(index, tokens)
        if not len(tokens):
            return self._bad(index, "it has no tokens")
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self.vocab_size:
                return self._bad(index, f"token id {token} is outside the model's vocabulary of {self.vocab_size}")
        return TokenisedDocument(Document(str(index), "", _NAME, index), tokens.astype(np.int32), Cursor())

    def _bad(self, index: int, reason: str) -> SkippedDocument:
        if self.on_error is OnError.fail:
            raise InputError(f"{_NAME}[{index}]: {reason}. Correct it, or set on_error='skip' for an empty result.")
        return SkippedDocument(_NAME, index, reason)


class GivenDocuments:
    """Tokenised documents in memory, as the documents of a stream. Their numbers are their places in it."""

    num_shards = 1
    info_schema = pa.schema([])

    def __init__(self, documents: Sequence[TokenisedDocument]) -> None:
        self._documents = documents

    def read(self, start: Cursor, should_stop: Callable[[], bool] = lambda: False) -> Iterator[TokenisedDocument]:
        for number in range(start.ordinal, len(self._documents)):
            document = self._documents[number]
            yield TokenisedDocument(document.document, document.tokens, Cursor(0, number, 0, number))


def write_texts(texts: Sequence[str | SkippedDocument], folder: str, ids: Iterable[str] | None) -> str:
    """Writes a parquet file with the columns id and text, and returns its path. The file name depends on the content,
    so that stores of different texts have different fingerprints. ids: None for the documents' numbers.

    Raises InputError if the number of ids differs from the number of documents.
    """
    names = list(map(str, range(len(texts)) if ids is None else items("ids", ids, "a list of strings")))
    if len(names) != len(texts):
        raise InputError(f"ids has {len(names)} entries for {len(texts)} documents. Give one id per document.")
    column = [text if isinstance(text, str) else "" for text in texts]  # the command skips empty ones
    digest = hashlib.sha256(json.dumps([names, column]).encode()).hexdigest()
    path = os.path.join(folder, f"texts-{digest[:16]}.parquet")
    table = pa.table({"id": names, "text": column}, schema=_PARQUET_SCHEMA)
    pq.write_table(table, path, compression="none", row_group_size=_ROW_GROUP)
    return path


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
