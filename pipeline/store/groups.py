"""Where the groups of generated documents lie, and their parquet files; `generated.py` says what is in them."""

import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tensorstore as ts

from pipeline.errors import StoreError, StoreInvalid
from pipeline.store.kvstore import list_keys, read_key
from pipeline.store.problems import Problem, Remedy

GENERATED_PREFIX = "_generated/"
_REMEDY = "Delete this group and those after it: they are then written again."


def stream_prefix(stream: int) -> str:
    """Of the keys of a stream's groups."""
    return f"{GENERATED_PREFIX}stream-{stream:05d}/"


def group_key(stream: int, index: int) -> str:
    """The group's key, relative to the store."""
    return f"{stream_prefix(stream)}group-{index:06d}.parquet"


def stored_groups(kvstore: ts.KvStore, stream: int) -> list[str]:
    """The keys of a stream's groups. Raises StoreInvalid unless they are 0, 1, 2, ..."""
    keys = [key for key in list_keys(kvstore, stream_prefix(stream)) if re.fullmatch(r".*/group-\d{6,}\.parquet", key)]
    keys.sort(key=lambda key: (len(key), key))
    for index, key in enumerate(keys):
        if key != group_key(stream, index):
            raise StoreInvalid(f"there is {key}, but no {group_key(stream, index)}. {_REMEDY}")
    return keys


def read_group(kvstore: ts.KvStore, stream: int, index: int) -> pa.Table:
    """The table of a group. Raises StoreInvalid when it is missing or damaged."""
    key = group_key(stream, index)
    content = read_key(kvstore, key)
    if content is None:
        raise StoreInvalid(f"{key} is missing, although its documents are asked for. Run the same command again.")
    try:
        return pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise StoreInvalid(f"{key} cannot be read: {error}. {_REMEDY}") from error


def check_groups(kvstore: ts.KvStore, stream: int, table: pa.Table) -> Iterator[Problem]:
    """What is wrong with a stream's groups, as far as there are any: one is missing among them or cannot be read, or a
    document has not the lengths that the stream's document table says."""
    if "n_prompt" not in table.column_names:
        return
    columns = ("document", "n_prompt", "n_completion")
    expected = {row["document"]: row for row in table.select(columns).to_pylist()}
    try:
        keys = stored_groups(kvstore, stream)
    except StoreError as error:
        yield Problem(stream_prefix(stream), str(error), Remedy.regenerate)
        return
    for index, key in enumerate(keys):
        try:
            group = read_group(kvstore, stream, index)
        except StoreError as error:
            yield Problem(key, str(error), Remedy.regenerate)
            continue
        for row in group.filter(pc.is_valid(group["document"])).to_pylist():
            sizes = (row["document"], len(row["prompt"]), len(row["completion"]))
            found = dict(zip(columns, sizes, strict=True))
            if found != expected.get(row["document"], found):
                yield Problem(key, f"has {found}, the document table {expected[row['document']]}", Remedy.regenerate)
