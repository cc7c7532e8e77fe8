"""The inputs of an Extractor: texts, token ids and chats."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.choices import OnError
from pipeline.core.arguments import flag, items
from pipeline.core.errors import InputError
from pipeline.core.messages import shown
from pipeline.data.documents import Cursor, Document, SkippedDocument, with_tokens
from pipeline.data.rows import documents_of_rows
from pipeline.data.text.contexts import Added
from pipeline.data.text.conversations import Conversations, TemplateForms
from pipeline.data.text.labels import Labels
from pipeline.data.text.templates import RenderError
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.data.tokenised import LONE_SURROGATE, TokenisedDocument

Chat = Sequence[Mapping[str, object]]
DocumentInput = str | Sequence[int] | np.ndarray | Chat

_NAME = "documents"  # the source in messages
_ROW_GROUP = 1000  # documents
_LONE = re.compile("[\ud800-\udfff]")


class MemorySource:
    """An Extractor's documents, read like a source with one shard. Chats are rendered."""

    shards = (_NAME,)
    info_schema = pa.schema([])

    def __init__(
        self,
        documents: Iterable[DocumentInput],
        tokenizer: TextTokenizer | None,
        on_error: OnError,
        add_generation_prompt: bool,
        *,
        are_alike: bool = False,
    ) -> None:
        """are_alike: whether token ids are refused beside texts. Raises InputError for a single document, or for texts
        without a tokenizer, and ConfigError for chats if the tokenizer has no usable template."""
        self._documents = _as_list(documents)
        self._tokenizer = tokenizer
        self._on_error = on_error
        self._add_generation_prompt = flag("add_generation_prompt", add_generation_prompt)
        texts = [document for document in self._documents if not _is_tokens(document)]
        self._takes_tokens = not (are_alike and texts)
        if texts and tokenizer is None:
            raise InputError(f"{_NAME} has texts, but the model has no tokenizer. Give token ids, or set tokenizer.")
        if any(map(_is_chat, texts)):
            tokenizer.require_chat()

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        """Raises InputError for what is no document, and for a bad one unless these are skipped."""
        rows = enumerate(self._documents[start:], start)
        return documents_of_rows(rows, self._document, _NAME, _NAME, self._on_error, "Correct it")

    def contents(self) -> list[str | list[int]]:
        """The texts, and the rendered chats; or, if all documents are token ids, these. Empty where one is skipped."""
        read = list(self.read(0, 0))
        if any(map(_is_tokens, self._documents)):
            return [[] if isinstance(item, SkippedDocument) else item.tokens.tolist() for item in read]
        return ["" if isinstance(item, SkippedDocument) else item.text for item in read]

    def _document(self, index: int, given: DocumentInput) -> Document:
        """Raises ValueError for a bad document."""
        document = Document(str(index), "", _NAME, index)
        if self._takes_tokens and _is_tokens(given):
            return with_tokens(document, {"tokens": given}, "tokens")
        if not isinstance(given, str) and not _is_chat(given):
            expected = "a text, a list of token ids, or" if self._takes_tokens else "a text (or only token ids), or"
            raise InputError(
                f"{_NAME}[{index}] is {shown(given)}. Expected {expected} a chat: a list of messages such as "
                "{'role': 'user', 'content': '...'}."
            )
        text, labels = (given, None) if isinstance(given, str) else self._rendered(given)
        if not text or _LONE.search(text):
            raise ValueError(LONE_SURROGATE.format("the text") if text else "the text is empty")
        return replace(document, text=text, labels=labels)

    def _rendered(self, chat: Chat) -> tuple[str, Labels | None]:
        """A chat's text, and its labels if the template's texts can be followed. Raises ValueError."""
        messages, template = _conversations(self._tokenizer).messages({_NAME: chat}), self._tokenizer.chat()
        try:
            rendered = template.render_labelled(messages, add_generation_prompt=self._add_generation_prompt)
        except RenderError:
            return template.render(messages, add_generation_prompt=self._add_generation_prompt), None
        return rendered.text, rendered.labels


@dataclass(frozen=True)
class GivenDocuments:
    """Tokenised documents in memory, as the documents of a stream."""

    num_shards = 1
    info_schema = pa.schema([])
    documents: Sequence[TokenisedDocument]
    added: Added

    def read(self, start: Cursor, should_stop: Callable[[], bool] = lambda: False) -> Iterator[TokenisedDocument]:
        yield from self.documents[start.ordinal :]


def write_documents(
    contents: Sequence[str | list[int]], folder: str, ids: Iterable[str] | None
) -> dict[str, str | None]:
    """Writes a parquet file with the columns id and text, or tokens, and returns the settings that read it. The command
    skips empty documents. The file name depends on the content, so that stores of different documents have different
    fingerprints. ids: None for the documents' numbers.

    Raises InputError if the number of ids differs from the number of documents, and for an id that is not UTF-8.
    """
    names = list(map(str, range(len(contents)) if ids is None else items("ids", ids, "a list of strings")))
    if len(names) != len(contents):
        raise InputError(f"ids has {len(names)} entries for {len(contents)} documents. Give one id per document.")
    digest = hashlib.sha256(json.dumps([names, contents]).encode()).hexdigest()
    path = os.path.join(folder, f"texts-{digest[:16]}.parquet")
    column = "tokens" if contents and isinstance(contents[0], list) else "text"
    kind = pa.list_(pa.int32()) if column == "tokens" else pa.large_string()
    try:
        table = pa.table({"id": pa.array(names, pa.string()), column: pa.array(contents, kind)})
    except UnicodeEncodeError as error:  # of the ids; texts were checked
        raise InputError(f"ids has {shown(error.object)}: {LONE_SURROGATE.format('it')}. Correct it.") from error
    pq.write_table(table, path, compression="none", row_group_size=_ROW_GROUP)
    return {"data.path": path, **({"data.tokens": column, "data.suffix": None} if column == "tokens" else {})}


@lru_cache(maxsize=1)
def _conversations(tokenizer: TextTokenizer) -> Conversations:
    """Reads chats for the tokenizer's template."""
    return Conversations(_NAME, None, None, TemplateForms.of(tokenizer.chat()))


def _as_list(documents: Iterable[DocumentInput]) -> list[DocumentInput]:
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
