"""What `data.on_error=skip` left out of a store, from its commit records: each block counts once, whoever wrote it."""

import re
from collections import Counter

from pipeline.core.messages import counted
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.commits import read_commit_records
from pipeline.store.io.storage import Storage

_MAX_REASONS = 8
_MAX_CHARACTERS = 200
_NUMBER = re.compile(r"\d+")  # reasons that only differ in numbers are counted together


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
