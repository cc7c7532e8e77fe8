"""Finishes a store: marks it complete once every stream holds its share of the target, and says what it lacks.

Several processes may finish a store at the same time, also while another one extends it: the summary's files never
change, the arrays' rows only grow, and the root is replaced only if it has not changed since it was read.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from pipeline.core.messages import counted
from pipeline.store.format.arrays import grow_rows
from pipeline.store.format.block_table import BlockTable, StreamBlocks, join_streams, num_rows
from pipeline.store.format.commits import read_commit_records
from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.metadata import StoreRoot, change_root
from pipeline.store.format.statistics import encode_statistics, merge_streams
from pipeline.store.format.summary import BLOCKS, IDS, STATISTICS, put_summary
from pipeline.store.format.target import is_reached
from pipeline.store.generated.documents import delete_used_groups
from pipeline.store.io.storage import Storage

_MAX_REASONS = 8
_MAX_CHARACTERS = 200
_NUMBER = re.compile(r"\d+")  # reasons that only differ in numbers are counted together

Streams = Mapping[int, StreamBlocks]  # all streams of a store, in order


def finish_store(
    storage: Storage, layout: StoreLayout, read: Callable[[], Streams], force: bool = False
) -> StoreRoot | None:
    """Writes the summary of the blocks that `read` returns, grows the arrays to the last committed row, and marks the
    store complete. Returns its root. An interrupted call is repeated as a whole; it writes nothing twice.

    Returns None and changes nothing if the root's target is not reached, because another run is extending the store, or
    the store has lost records. `force` completes it anyway. See also `delete_used_groups`. Raises StoreError.
    """
    num_documents: dict[int, int] = {}

    def finished(root: StoreRoot) -> StoreRoot | None:
        streams = read()
        if not (force or is_reached([stream.table for stream in streams.values()], root.target)):
            return None
        blocks = join_streams(streams)
        summary = _summary(storage, root, blocks, streams)
        grow_rows(storage, layout, num_rows(blocks, layout))
        num_documents.update({stream: blocks.last.next["ordinal"] for stream, blocks in streams.items() if blocks.last})
        return replace(root, complete=True, summary=summary)

    root = change_root(storage, finished)
    if root is not None:
        delete_used_groups(storage, root.metadata, num_documents)
    return root


def _summary(storage: Storage, root: StoreRoot, table: BlockTable, streams: Streams) -> dict[str, str | int | None]:
    """The root's summary, whose files are then stored."""
    before = root.summary or {}
    blocks = put_summary(storage, BLOCKS, table.encode())
    if blocks == before.get(BLOCKS):
        return dict(before)
    statistics = merge_streams(storage, [stream.last for stream in streams.values() if stream.last])
    sha256 = put_summary(storage, STATISTICS, encode_statistics(statistics)) if statistics else None
    return {IDS: None, **before, BLOCKS: blocks, STATISTICS: sha256}


def describe_skips(storage: Storage, blocks: BlockTable) -> str:
    """How many rows of the input these blocks skipped, and why; "" if none. Raises StoreError."""
    first: dict[str, str] = {}  # by reason
    rows, files = Counter[str](), Counter[str]()
    numbers = [(block.stream, block.block) for block in blocks[blocks.column("skipped") > 0]]
    for record in read_commit_records(storage, numbers):
        for skip in record.skipped:
            reason = _NUMBER.sub("0", skip["reason"])[:_MAX_CHARACTERS]
            first.setdefault(reason, f"first {skip['source']} row {skip['index']}: {skip['reason'][:_MAX_CHARACTERS]}")
            count = skip.get("rows", 1)  # None: unknown, since the rest of a file was skipped
            rows[reason] += count or 0
            files[reason] += count is None
    nouns = {"row": rows, "damaged file": files}
    reasons = [
        ", ".join([*(counted(counter[reason], noun) for noun, counter in nouns.items() if counter[reason]), text])
        for reason, text in sorted(first.items(), key=lambda item: (files[item[0]], rows[item[0]]), reverse=True)
    ]
    if len(reasons) > _MAX_REASONS:
        reasons[_MAX_REASONS:] = [f"and {counted(len(reasons) - _MAX_REASONS, 'other reason')}"]
    total = counted(rows.total(), "row")
    return f"{total} of the input (data.on_error=skip): {'; '.join(reasons)}" if reasons else ""
