"""Texts as chats: each document becomes a user's message that the assistant is about to answer."""

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from pipeline.data.documents import Document, SkippedDocument, Source
from pipeline.data.tokenizer import TextTokenizer


class ChatSource:
    """The documents of `source`, rendered by the tokenizer's chat template."""

    def __init__(self, source: Source, tokenizer: TextTokenizer) -> None:
        """Raises ConfigError for a tokenizer without a chat template that can be used."""
        tokenizer.require_chat()
        self.shards: tuple[str, ...] = source.shards
        self.info_schema: pa.Schema = source.info_schema
        self._source = source
        self._tokenizer = tokenizer

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        for item in self._source.read(shard, start):
            yield item if isinstance(item, SkippedDocument) else replace(item, text=self._rendered(item.text))

    def fingerprint(self) -> dict[str, object]:
        """The source's, and the template's."""
        return self._source.fingerprint() | {"chat_template_sha256": self._tokenizer.chat_identity()}

    def _rendered(self, text: str) -> str:
        return self._tokenizer.render_chat([{"role": "user", "content": text}], add_generation_prompt=True)
