"""Renders texts as chats: each document becomes a user's message, followed by the prompt for the assistant."""

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from pipeline.config.choices import OnError
from pipeline.core.errors import InputError
from pipeline.data.documents import Document, SkippedDocument, Source
from pipeline.data.text.templates import RenderError
from pipeline.data.text.tokenizer import TextTokenizer


class ChatSource:
    """The documents of `source`, rendered by the tokenizer's chat template."""

    def __init__(self, source: Source, tokenizer: TextTokenizer, on_error: OnError) -> None:
        """Raises ConfigError for a tokenizer without a usable chat template."""
        tokenizer.require_chat()
        self.shards: tuple[str, ...] = source.shards
        self.info_schema: pa.Schema = source.info_schema
        self._source = source
        self._tokenizer = tokenizer
        self._on_error = on_error

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        for item in self._source.read(shard, start):
            yield item if isinstance(item, SkippedDocument) else self._rendered(item)

    def fingerprint(self) -> dict[str, object]:
        """The source's fingerprint, and the template's."""
        return self._source.fingerprint() | self._tokenizer.chat_identity()

    def _rendered(self, document: Document) -> Document | SkippedDocument:
        messages = [{"role": "user", "content": document.text}]
        try:
            return replace(document, text=self._tokenizer.render_chat(messages, add_generation_prompt=True))
        except RenderError as error:
            if self._on_error is OnError.fail:
                raise InputError(
                    f"{document.source} row {document.index}: {error}. Correct the document or the template, or set "
                    "data.on_error=skip."
                ) from error
            return SkippedDocument(document.source, document.index, str(error))
