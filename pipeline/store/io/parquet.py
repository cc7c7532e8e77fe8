"""Parquet files that were read whole into memory."""

import pyarrow as pa
import pyarrow.parquet as pq


def decode_parquet(content: bytes, verify_pages: bool = False) -> pa.Table:
    """The table of a parquet file. verify_pages: compare the checksums that its pages have. Raises what pyarrow raises
    for damage: ArrowException and OSError.

    No thread of pyarrow's takes part, as with `pq.read_table`. One that lets go of `content` while Python ends is
    stopped within a C++ destructor, which aborts the process: "terminate called without an active exception", exit
    code 134.
    """
    with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=verify_pages) as file:
        return file.read(use_threads=False)
