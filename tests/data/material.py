"""Small inputs: a word tokenizer, and parquet files in memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from pipeline.config.choices import OnError
from pipeline.config.schema import ParquetData
from pipeline.data.documents import Source, TokenBlock
from pipeline.data.parquet import ParquetSource
from pipeline.data.stream import TokenStream
from pipeline.data.text.contexts import NOTHING, Added
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.data.tokenised import TokenisedDocuments

VOCAB_SIZE = 1000


def word_library_tokenizer(*, bos: bool = False) -> Tokenizer:
    """Word `w7` has id 7. With `bos`, the word `w0` precedes every text."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w1"))
    tokenizer.pre_tokenizer = Whitespace()
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="w0 $A", special_tokens=[("w0", 0)])
    return tokenizer


def word_tokenizer(**settings) -> TextTokenizer:
    bos = settings.pop("bos", False)
    return TextTokenizer(word_library_tokenizer(bos=bos), name="words", digest="0", **settings)


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def write_parquet(path: str, columns: Mapping[str, Sequence], row_group_size: int = 3) -> None:
    """Writes a parquet file to any address that fsspec supports."""
    with fsspec.open(path, "wb") as file:
        pq.write_table(pa.table(dict(columns)), file, row_group_size=row_group_size)


def damage_column(path: Path, group: int) -> None:
    """Overwrites the first column of one row group."""
    column = pq.ParquetFile(path).metadata.row_group(group).column(0)
    content = bytearray(path.read_bytes())
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)


def memory_source(folder: str, shards: Sequence[Sequence[Sequence[int]]], **settings) -> ParquetSource:
    """A source whose documents have these token ids (of `word_tokenizer`), one file per shard. Ids are `shard-row`."""
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(folder):
        filesystem.rm(folder, recursive=True)
    for number, documents in enumerate(shards):
        columns = {
            "text": pa.array([words(ids) for ids in documents], pa.string()),
            "id": pa.array([f"{number}-{row}" for row in range(len(documents))], pa.string()),
            "url": pa.array([f"http://{number}/{row}" for row in range(len(documents))], pa.string()),
        }
        write_parquet(f"memory://{folder}/{number:03d}.parquet", columns)
    return ParquetSource(ParquetData(source="parquet", path=f"memory://{folder}", **settings))


def text_stream(
    source: Source,
    tokenizer: TextTokenizer,
    *,
    stream: int = 0,
    num_streams: int = 1,
    on_error: OnError = OnError.fail,
    vocab_size: int | None = None,
    added: Added = NOTHING,
    **settings,
) -> TokenStream:
    """A stream of a source's texts, by default the only one."""
    shards = range(stream, len(source.shards), num_streams)
    documents = TokenisedDocuments(source, tokenizer, shards, on_error=on_error, vocab_size=vocab_size, added=added)
    return TokenStream(documents, stream=stream, num_streams=num_streams, **settings)


def assert_same_block(left: TokenBlock, right: TokenBlock) -> None:
    for name in ("tokens", "segments", "positions", "documents"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    np.testing.assert_array_equal(left.selected, right.selected)
    np.testing.assert_array_equal(left.labels, right.labels)
    assert left.table.equals(right.table)
    for name in ("stream", "index", "skipped", "start", "next", "exhausted"):
        assert getattr(left, name) == getattr(right, name), name
