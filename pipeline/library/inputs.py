"""The inputs of an Extractor: texts, token ids and chats."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.choices import OnError
from pipeline.config.limits import shown
from pipeline.core.arguments import flag, items
from pipeline.core.errors import InputError
from pipeline.data.documents import Cursor, Document, SkippedDocument
from pipeline.data.text.contexts import NOTHING, Added
from pipeline.data.text.conversations import Conversations, TemplateForms
from pipeline.data.text.labels import Labels
from pipeline.data.text.templates import RenderError
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.data.tokenised import Encoded, TokenisedDocument, encoded

log = logging.getLogger("pipeline")

Chat = Sequence[Mapping[str, object]]
DocumentInput = str | Sequence[int] | np.ndarray | Chat

_NAME = "documents"  # the source in messages
_ROW_GROUP = 1000  # documents


@dataclass(frozen=True)
class DocumentReader:
    """Renders chats and tokenises texts. tokenizer: None for a model without one, which takes token ids. on_error:
    whether a bad document raises InputError or is skipped. added: see `open_added`."""

    tokenizer: TextTokenizer | None
    vocab_size: int
    on_error: OnError
    add_generation_prompt: bool
    added: Added = NOTHING
    _said: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        flag("add_generation_prompt", self.add_generation_prompt)

    def contents(self, documents: Sequence[DocumentInput]) -> list[str | list[int]]:
        """The texts, and the rendered chats; or, if all documents are token ids, these. Empty for a skipped document.
        Raises InputError for anything else, and ConfigError for a chat if the tokenizer has no usable template."""
        if documents and all(map(_is_tokens, documents)):
            ids = self.tokenised(documents)
            return [[] if isinstance(item, SkippedDocument) else item.tokens.tolist() for item in ids]
        self._require_usable(documents)
        expected = "a text (or only token ids), or"
        read = [self._document(index, document, expected) for index, document in enumerate(documents)]
        return [item.text if isinstance(item, Document) else "" for item in read]

    def tokenised(self, documents: Sequence[DocumentInput]) -> list[TokenisedDocument | SkippedDocument]:
        """Every document's tokens, in order; token ids are used unchanged. A document without tokens, or with tokens
        outside the model's vocabulary, is a bad one."""
        self._require_usable([document for document in documents if not _is_tokens(document)])
        expected = "a text, a list of token ids, or"
        read: list[Document | SkippedDocument | Encoded] = [
            (np.asarray(document), None) if _is_tokens(document) else self._document(index, document, expected)
            for index, document in enumerate(documents)
        ]
        results = iter(self._encoded([item for item in read if isinstance(item, Document)]))
        with_tokens = [next(results) if isinstance(item, Document) else item for item in read]
        return [
            item if isinstance(item, SkippedDocument) else self._checked(index, item, _is_tokens(documents[index]))
            for index, item in enumerate(with_tokens)
        ]

    def _require_usable(self, texts: Sequence[DocumentInput]) -> None:
        if texts and self.tokenizer is None:
            raise InputError(f"{_NAME} has texts, but the model has no tokenizer. Give token ids, or set tokenizer.")
        if any(map(_is_chat, texts)):
            self.tokenizer.require_chat()

    def _document(self, index: int, document: DocumentInput, expected: str) -> Document | SkippedDocument:
        if not isinstance(document, str) and not _is_chat(document):
            raise InputError(
                f"{_NAME}[{index}] is {shown(document)}. Expected {expected} a chat: a list of messages such as "
                "{'role': 'user', 'content': '...'}."
            )
        text, labels = document, None
        try:
            if not isinstance(document, str):
                text, labels = self._rendered(index, document)
            text.encode()
        except UnicodeEncodeError:
            return self._bad(index, "the text has a lone surrogate, so is not UTF-8")
        except ValueError as error:
            return self._bad(index, str(error))
        return (
            Document(str(index), text, _NAME, index, labels=labels) if text else self._bad(index, "the text is empty")
        )

    def _rendered(self, index: int, chat: Chat) -> tuple[str, Labels | None]:
        """A chat's text, and its labels if the template's texts can be followed. Raises ValueError."""
        messages = _conversations(self.tokenizer).messages({_NAME: chat})
        try:
            rendered = self.tokenizer.render_labelled(messages, add_generation_prompt=self.add_generation_prompt)
        except RenderError as error:
            text = self.tokenizer.render_chat(messages, add_generation_prompt=self.add_generation_prompt)
            self._say_once("has no labels", index, str(error))
            return text, None
        if rendered.dropped:
            self._say_once("is not whole", index, f"the chat template leaves out {rendered.dropped} characters of it")
        return rendered.text, rendered.labels

    def _say_once(self, what: str, index: int, reason: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("%s[%d] %s: %s", _NAME, index, what, reason)

    def _encoded(self, documents: list[Document]) -> list[Encoded | str]:
        """The tokens and labels of each document, or why it cannot be tokenised."""
        try:
            return list(encoded(self.tokenizer, documents))
        except ValueError as error:
            if len(documents) == 1:
                return [str(error)]
            return [result for document in documents for result in self._encoded([document])]

    def _checked(self, index: int, result: Encoded | str, is_given: bool) -> TokenisedDocument | SkippedDocument:
        if isinstance(result, str):
            return self._bad(index, result)
        tokens, labels = result
        if not len(tokens):
            return self._bad(index, "it has no tokens")
        if is_given and (problem := self.added.problem(tokens)):
            return self._bad(index, problem)
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self.vocab_size:
                return self._bad(index, f"token id {token} is outside the model's vocabulary of {self.vocab_size}")
        document = Document(str(index), "", _NAME, index)
        return TokenisedDocument(document, tokens.astype(np.int32), Cursor(), labels=labels)

    def _bad(self, index: int, reason: str) -> SkippedDocument:
        if self.on_error is OnError.fail:
            raise InputError(f"{_NAME}[{index}]: {reason}. Correct it, or set on_error='skip' for an empty result.")
        return SkippedDocument(_NAME, index, reason)


class GivenDocuments:
    """Tokenised documents in memory, as the documents of a stream. Their numbers are their places in it."""

    num_shards = 1
    info_schema = pa.schema([])

    def __init__(self, documents: Sequence[TokenisedDocument], added: Added = NOTHING) -> None:
        self._documents = documents
        self.added = added

    def read(self, start: Cursor, should_stop: Callable[[], bool] = lambda: False) -> Iterator[TokenisedDocument]:
        for number in range(start.ordinal, len(self._documents)):
            yield replace(self._documents[number], cursor=Cursor(0, number, 0, number))


def write_documents(
    contents: Sequence[str | list[int]], folder: str, ids: Iterable[str] | None
) -> dict[str, str | None]:
    """Writes a parquet file with the columns id and text, or tokens, and returns the settings that read it. The command
    skips empty documents. The file name depends on the content, so that stores of different documents have different
    fingerprints. ids: None for the documents' numbers.

    Raises InputError if the number of ids differs from the number of documents.
    """
    names = list(map(str, range(len(contents)) if ids is None else items("ids", ids, "a list of strings")))
    if len(names) != len(contents):
        raise InputError(f"ids has {len(names)} entries for {len(contents)} documents. Give one id per document.")
    digest = hashlib.sha256(json.dumps([names, contents]).encode()).hexdigest()
    path = os.path.join(folder, f"texts-{digest[:16]}.parquet")
    column = "tokens" if contents and isinstance(contents[0], list) else "text"
    kind = pa.list_(pa.int32()) if column == "tokens" else pa.large_string()
    table = pa.table({"id": pa.array(names, pa.string()), column: pa.array(contents, kind)})
    pq.write_table(table, path, compression="none", row_group_size=_ROW_GROUP)
    return {"data.path": path, **({"data.tokens": column, "data.suffix": None} if column == "tokens" else {})}


@lru_cache(maxsize=1)
def _conversations(tokenizer: TextTokenizer) -> Conversations:
    """Reads chats for the tokenizer's template."""
    forms = TemplateForms.of(partial(tokenizer.render_chat, add_generation_prompt=False))
    return Conversations(_NAME, None, None, forms)


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
