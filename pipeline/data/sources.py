"""Opens the source of a configuration's `data` group.

Sources are imported when needed: importing `datasets`, and pandas with it, would cost every run 0.6 s.
"""

import os
from collections.abc import Callable
from dataclasses import fields

from pipeline.config.choices import Template
from pipeline.config.schema import ArcData, DataConfig, GenerateData, HfData, ParquetData
from pipeline.core.errors import ConfigError
from pipeline.core.hub import is_hub_id
from pipeline.data.arc.loading import hub_id
from pipeline.data.documents import Source
from pipeline.data.files import hf_settings, is_glob
from pipeline.data.manifest import MakeManifest, Manifest, make_alone
from pipeline.data.parquet import ParquetSource
from pipeline.data.text.chat import ChatSource
from pipeline.data.text.tokenizer import TextTokenizer


def open_source(
    config: DataConfig,
    tokenizer: TextTokenizer,
    agree: Callable[[MakeManifest], Manifest] = make_alone,
) -> Source:
    """Opens a source: lists its shards, and checks what can be checked without reading all of them. For `data=generate`
    it is the source of the prompts.

    tokenizer: renders chat templates. agree: makes the manifest of the source's files; in a job, on one process.
    Raises InputError or ConfigError.
    """
    match config:
        case ParquetData(source="parquet"):
            return ParquetSource(config, agree)
        case ArcData(source="arc"):
            from pipeline.data.arc.source import ArcSource

            return ArcSource(config, tokenizer, agree)
        case HfData(source="hf"):
            from pipeline.data.hf import HfSource

            return HfSource(config, agree)
        case GenerateData(source="generate"):
            return _open_prompts(config, tokenizer, agree)
    raise ConfigError(
        f"data.source={config.source} with the keys of {type(config).__name__}. Choose the data with data=fineweb, "
        "fineweb_edu, arc, ai2_arc, hf or generate, and do not set data.source."
    )


def renders_chat(config: DataConfig) -> bool:
    """Whether documents, or the prompts' documents, are rendered with a chat template."""
    if isinstance(config, GenerateData) and isinstance(config.prompts, DataConfig) and renders_chat(config.prompts):
        return True
    return isinstance(config, ArcData | GenerateData) and config.template is Template.chat


def num_named_files(config: DataConfig) -> int | None:
    """The number of files, which are the source shards, where the configuration names each of them; None if the data
    must be opened to count source shards."""
    match config:
        case GenerateData():
            return num_named_files(config.prompts)
        case ParquetData(path=str(path), row_groups_per_shard=None) if os.path.isfile(os.path.expanduser(path)):
            return 1
        case HfData(data_files=files) if files:
            named = [files] if isinstance(files, str) else files
            return len(named) if all(hf_settings(file) and not is_glob(file) for file in named) else None
    return None


def hub_repository(config: DataConfig) -> str | None:
    """The Hub dataset that a source reads; None if its data is elsewhere."""
    match config:
        case ParquetData(path=None):
            return config.repo
        case ArcData():
            return hub_id(config.path)
        case HfData():
            from pipeline.data.hub_files import LOADERS

            if config.path in LOADERS or os.path.exists(os.path.expanduser(config.path)):
                return None
            return hub_id(config.path) or (config.path if is_hub_id(config.path) else None)
    return None


def _open_prompts(config: GenerateData, tokenizer: TextTokenizer, agree: Callable[[MakeManifest], Manifest]) -> Source:
    prompts = config.prompts
    if isinstance(prompts, GenerateData):
        raise ConfigError("data.prompts is also generate. Choose a different source with data@data.prompts=...")
    for name in ("path", *(field.name for field in fields(DataConfig) if field.name != "source")):
        ours, theirs = getattr(config, name), getattr(prompts, name)
        if ours != theirs:
            raise ConfigError(
                f"data.prompts.{name} is {theirs}, but data.{name} is {ours}. Set only data.{name}, which also applies "
                "to the prompts."
            )
    if isinstance(prompts, ArcData):
        if prompts.include_solution:
            raise ConfigError(
                "data.prompts.include_solution is true, but prompts must not contain answers. Set it to false."
            )
        if prompts.template is Template.chat and config.template is Template.chat:
            raise ConfigError("data.template and data.prompts.template are both chat. Set one of them to plain.")
    source = open_source(prompts, tokenizer, agree)
    return ChatSource(source, tokenizer, config.on_error) if config.template is Template.chat else source
