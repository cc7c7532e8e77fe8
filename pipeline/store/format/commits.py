"""Commit records: a block is in the store exactly when its record exists.

A record is a small JSON object, put last, once the block's other objects are stored. It describes these objects as they
are stored, whoever wrote them. A record repeats the counts of up to 255 earlier blocks (`recent`), so that few records
have to be read for the counts of a whole stream; see `block_table.py`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.keys import Kind, block_key, parse_key, stream_prefix
from pipeline.store.io.failures import VERIFY_REMEDY
from pipeline.store.io.parsing import Each, Of, integers, json_digest, mismatch, parse_store_json
from pipeline.store.io.storage import Storage

COMMITS_PREFIX = "_commits/"
_KEYS_IN_ORDER = 900_000  # from this block on, all keys are listed: those with seven digits sort before those with six
NUM_COUNTS = 8  # of a block in `recent`
BLOCKS_PER_GROUP = 256  # a record repeats the counts of earlier blocks of its group: about 12 kB
_MAX_COUNT = 1 << 63


def _are_counts(value: Any) -> bool:
    """Whether this is a list of blocks' counts. Faster than a schema, for up to 255 blocks."""
    return isinstance(value, list) and all(
        isinstance(counts, list)
        and len(counts) == NUM_COUNTS
        and all(type(count) is int and 0 <= count < _MAX_COUNT for count in counts)
        for counts in value
    )


_COUNT, _LARGE_COUNT = integers(0, (1 << 32) - 1), integers(0, _MAX_COUNT - 1)
_CURSOR = dict.fromkeys(("shard", "document", "token", "ordinal"), _LARGE_COUNT)
_RECORD = {
    **dict.fromkeys(("stream", "block", "rows", "tokens", "activations", "documents"), _COUNT),
    "tokens_cut": _LARGE_COUNT,
    "skipped": [{"source": str, "index": int, "reason": str, "rows?": (None, int)}],
    "start": _CURSOR,
    "next": _CURSOR,
    "exhausted": bool,
    "documents_sha256": str,
    "statistics_sha256": str,
    "digests": Each(str),
    "recent": Of(_are_counts, f"lists of {NUM_COUNTS} counts"),  # see `block_table.counts_of`
    "written_by": str,
    "sha256": str,
}


@dataclass(frozen=True)
class CommitRecord:
    """The content of one block of one stream.

    rows: the number of rows with tokens, which are the first rows of the block.
    tokens: the number of valid (not padding) tokens. activations: of how many of these activations are stored.
    documents: the number of rows of the block's document table.
    tokens_cut: how many tokens `batch.long_documents=cut` dropped from these documents.
    skipped: what `data.on_error=skip` left out, as {source, index, reason, rows}, see `SkippedDocument`.
    start, next: the cursors (as JSON) at which this block and the stream's next one start.
    exhausted: the stream has no more documents after this block.

    Set by the writer:
    documents_sha256, statistics_sha256: of the document table's and the statistics' files ("" without statistics).
    digests: by array, the digest of its stored values, see `ShardFormat`.
    recent: the counts of the blocks since the last multiple of BLOCKS_PER_GROUP, as in `block_table.counts_of`.
    written_by: the process that put the record. Two records that differ in nothing else are of the same block.
    """

    stream: int
    block: int
    rows: int
    tokens: int
    activations: int
    documents: int
    tokens_cut: int
    skipped: tuple[Mapping[str, Any], ...]
    start: Mapping[str, int]
    next: Mapping[str, int]
    exhausted: bool
    documents_sha256: str = ""
    statistics_sha256: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    recent: tuple[tuple[int, ...], ...] = ()
    written_by: str = ""

    @property
    def key(self) -> str:
        return commit_key(self.stream, self.block)

    def is_same_block(self, other: "CommitRecord") -> bool:
        """Whether both records describe the same objects, whoever put the record."""
        return replace(self, written_by="") == replace(other, written_by="")

    def to_json(self) -> bytes:
        """UTF-8 JSON with the keys in a fixed order, and a checksum that reveals edits."""
        content = asdict(self)
        return (json.dumps(content | {"sha256": json_digest(content)}, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes, subject: str) -> "CommitRecord":
        """Raises StoreInvalid, naming `subject`, for a record that is damaged or edited."""
        content = parse_store_json(text, subject, VERIFY_REMEDY)
        what = mismatch(content, _RECORD)
        if what is None and len(content) != len(fields(cls)) + 1:
            what = f"it has the keys {', '.join(content)}"
        if what is None and len(content["recent"]) != content["block"] % BLOCKS_PER_GROUP:
            what = "'recent' does not have the counts of earlier blocks"
        if what is not None:
            raise StoreInvalid(f"{subject} is not a commit record: {what}. {VERIFY_REMEDY}")
        digest = content.pop("sha256")
        if digest != json_digest(content):
            raise StoreInvalid(f"{subject} does not match its own checksum: it was edited or damaged. {VERIFY_REMEDY}")
        return cls(**content | {"skipped": tuple(content["skipped"]), "recent": tuple(map(tuple, content["recent"]))})


def commit_key(stream: int, block: int) -> str:
    """The key of a block's commit record, relative to the store."""
    return block_key(COMMITS_PREFIX, stream, block, ".json")


def parse_commit_key(key: str) -> tuple[int, int] | None:
    """The (stream, block) of a commit record's key; None for any other key."""
    parsed = parse_key(key)
    is_record = parsed is not None and parsed.kind is Kind.record and key.endswith(".json")  # no temporary file
    return (parsed.stream, parsed.number) if is_record else None


def list_blocks(storage: Storage, stream: int, first: int = 0) -> range:
    """The blocks of a stream that have a record, from block `first` on. Raises StoreInvalid for a gap between them, and
    StoreError."""
    start = commit_key(stream, first) if first < _KEYS_IN_ORDER else ""

    def listed() -> range:
        parsed = filter(None, map(parse_commit_key, storage.list_keys(stream_prefix(COMMITS_PREFIX, stream), start)))
        blocks = sorted(block for _, block in parsed if block >= first)
        for expected, block in enumerate(blocks, first):
            if block != expected:
                raise StoreInvalid(
                    f"stream {stream} of {storage.path} has a record of block {block}, but not of block {expected}. "
                    "Run pipeline.verify with verify.repair=true, then the job again: it computes these blocks again."
                )
        return range(first, first + len(blocks))

    return storage.retry_read(listed)  # a listing may lack a block that was committed while it was made


def read_commit_records(storage: Storage, blocks: Iterable[tuple[int, int]]) -> Iterator[CommitRecord]:
    """The records of `blocks`, given as (stream, block). Raises StoreInvalid if one is missing or damaged, and
    StoreError."""
    return storage.read_checked([commit_key(*block) for block in blocks], partial(require_record, storage))


def require_record(storage: Storage, key: str, text: bytes | None) -> CommitRecord:
    """Parses the record of a committed block. Raises StoreInvalid if it is missing (`text` is None), damaged, or that
    of another block."""
    if text is None:
        raise StoreInvalid(f"{storage.path}/{key} is missing, although the block is committed. {VERIFY_REMEDY}")
    record = CommitRecord.from_json(text, f"{storage.path}/{key}")
    if record.key != key:
        raise StoreInvalid(f"{storage.path}/{key} is the record of block {record.block} of stream {record.stream}.")
    return record
