"""From the configuration's `data` group to the source that it names.

A source is imported when it is opened: `datasets`, and the pandas behind it, would otherwise cost every run 0.6 s.
"""

from pipeline.config import ArcData, DataConfig, HfData, ParquetData
from pipeline.data.documents import Source
from pipeline.data.parquet import ParquetSource
from pipeline.data.tokenizer import TextTokenizer
from pipeline.errors import ConfigError


def open_source(config: DataConfig, tokenizer: TextTokenizer) -> Source:
    """Lists the source shards and checks what can be checked without reading them all.

    `tokenizer` renders the prompts of a source that asks for its chat template. Raises InputError or ConfigError.
    """
    match config:
        case ParquetData(source="parquet"):
            return ParquetSource(config)
        case ArcData(source="arc"):
            from pipeline.data.arc.source import ArcSource

            return ArcSource(config, tokenizer)
        case HfData(source="hf"):
            from pipeline.data.hf import HfSource

            return HfSource(config)
    raise ConfigError(
        f"data.source={config.source} with the keys of {type(config).__name__}. Choose the data by data=fineweb, "
        "fineweb_edu, arc, ai2_arc or hf, and leave data.source alone."
    )
