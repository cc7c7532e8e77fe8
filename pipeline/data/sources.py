"""From the configuration's `data` group to the source that it names."""

from pipeline.config import DataConfig, ParquetData
from pipeline.data.documents import Source
from pipeline.data.parquet import ParquetSource
from pipeline.data.tokenizer import TextTokenizer
from pipeline.errors import ConfigError


def open_source(config: DataConfig, tokenizer: TextTokenizer) -> Source:
    """Lists the source shards and checks what can be checked without reading them all.

    `tokenizer` renders the prompts of a source that asks for its chat template. Raises InputError or ConfigError.
    """
    match config:
        case ParquetData():
            return ParquetSource(config)
    raise ConfigError(f"data.source={config.source!r} is unknown, expected parquet, arc or hf.")
