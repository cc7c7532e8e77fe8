"""Decoding parquet files from memory."""

import pyarrow as pa
import pyarrow.parquet as pq


def decode_parquet(content: bytes, verify_pages: bool = False) -> pa.Table:
    """The table of a parquet file. verify_pages: compare the pages' checksums. Raises pyarrow's errors for damaged
    files: ArrowException and OSError.

    Unlike `pq.read_table`, it uses no thread of pyarrow. If such a thread releases `content` while Python exits, it is
    stopped within a C++ destructor, which aborts the process: "terminate called without an active exception", exit
    code 134.
    """
    with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=verify_pages) as file:
        return file.read(use_threads=False)
