"""Opens the source of a configuration's `data` group.

Sources are imported when needed: importing `datasets`, and pandas with it, would cost every run 0.6 s.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import pyarrow as pa

from pipeline.config.choices import OnError, Template
from pipeline.config.schema import ArcData, DataConfig, GenerateData, HfData, ParquetData
from pipeline.core.errors import ConfigError
from pipeline.core.hub import is_hub_id
from pipeline.data.documents import Document, SkippedDocument, Source
from pipeline.data.files import hub_data_set
from pipeline.data.manifest import MakeManifest, Manifest, make_alone
from pipeline.data.parquet import ParquetSource
from pipeline.data.text.templates import RenderError
from pipeline.data.text.tokenizer import TextTokenizer


def open_source(
    config: DataConfig,
    tokenizer: TextTokenizer | None,
    agree: Callable[[MakeManifest], Manifest] = make_alone,
    are_prompts: bool = False,
) -> Source:
    """Opens a source: lists its shards, and checks what can be checked without reading all of them. For `data=generate`
    it is the source of the prompts.

    tokenizer: has a usable chat template if `renders_chat`; None with `data.tokens`. agree: makes the manifest of the
    source's files; in a job, on one process. are_prompts: whether the model is to answer the documents.
    Raises InputError or ConfigError.
    """
    match config:
        case ParquetData():
            return ParquetSource(config, agree)
        case ArcData():
            from pipeline.data.arc.source import ArcSource

            return ArcSource(config, tokenizer, agree)
        case HfData():
            from pipeline.data.hf import HfSource

            return HfSource(config, tokenizer, agree, are_prompts)
    return _open_prompts(config, tokenizer, agree)


def renders_chat(config: DataConfig) -> bool:
    """Whether documents, or the prompts' documents, are rendered with a chat template."""
    if isinstance(config, GenerateData) and isinstance(config.prompts, DataConfig) and renders_chat(config.prompts):
        return True
    return has_labels(config) or (isinstance(config, ArcData | GenerateData) and config.template is Template.chat)


def has_labels(config: DataConfig) -> bool:
    """Whether documents are conversations, whose tokens have labels."""
    return isinstance(config, HfData) and config.messages is not None


def hub_repository(config: DataConfig) -> str | None:
    """The Hub dataset that a source reads; None if its data is elsewhere."""
    match config:
        case ParquetData() | ArcData():
            return hub_data_set(config.path, is_whole=isinstance(config, ArcData))
        case HfData():
            from pipeline.data.dataset_files import LOADERS

            if config.path in LOADERS or os.path.exists(os.path.expanduser(config.path)):
                return None
            return hub_data_set(config.path, is_whole=True) or (config.path if is_hub_id(config.path) else None)
    return None


def _open_prompts(config: GenerateData, tokenizer: TextTokenizer, agree: Callable[[MakeManifest], Manifest]) -> Source:
    prompts = config.prompts
    if getattr(prompts, "tokens", None):
        raise ConfigError(
            "data.prompts.tokens is set, but prompts are texts. Remove it, and set the column of the text."
        )
    for name in (field.name for field in fields(DataConfig) if field.name != "source"):
        ours, theirs = getattr(config, name), getattr(prompts, name)
        if ours != theirs:
            raise ConfigError(
                f"data.prompts.{name} is {theirs}, but data.{name} is {ours}. Set only data.{name}, which also applies "
                "to the prompts."
            )
    if isinstance(prompts, ArcData) and prompts.include_solution:
        raise ConfigError(
            "data.prompts.include_solution is true, but prompts must not contain answers. Set it to false."
        )
    if config.template is Template.chat and renders_chat(prompts):
        given = "data.prompts.messages is set" if has_labels(prompts) else "data.prompts.template is chat, too"
        raise ConfigError(f"data.template is chat, but {given}. Set data.template=plain.")
    source = open_source(prompts, tokenizer, agree, are_prompts=True)
    return ChatSource(source, tokenizer, config.on_error) if config.template is Template.chat else source


class ChatSource:
    """The documents of `source` as chats: each is a user's message, followed by the prompt for the assistant."""

    def __init__(self, source: Source, tokenizer: TextTokenizer, on_error: OnError) -> None:
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
            return replace(document, text=self._tokenizer.chat().render(messages, add_generation_prompt=True))
        except RenderError as error:
            skip = SkippedDocument(document.source, document.index, str(error))
            where = f"{skip.source} row {skip.index}"
            return skip.if_allowed(self._on_error, where, "Correct the document or the template")
