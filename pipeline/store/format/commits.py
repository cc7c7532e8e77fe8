"""Commit records: a block is in the store exactly when its record exists.

A record is a small JSON object. It is written last, once the block's arrays and document table are durable. It has no
value that differs from run to run, so a recomputed block gets a record with the same bytes.

Most readers need only a record's counts, which the block table (`block_table.py`) repeats.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.keys import block_key, stream_prefix
from pipeline.store.io.digests import json_digest
from pipeline.store.io.failures import VERIFY_REMEDY
from pipeline.store.io.parsing import parse_store_json
from pipeline.store.io.storage import Storage

COMMITS_PREFIX = "_commits/"
_KEY = re.compile(r"_commits/stream-(\d{5,})/block-(\d{6,})\.json")
_KEYS_IN_ORDER = 900_000  # from this block on, all keys are listed: those with seven digits sort before those with six
_COUNTS = ("version", "stream", "block", "rows", "tokens", "documents")
_MAX_COUNT, _MAX_CURSOR = 1 << 32, 1 << 63
_CURSOR = {"shard", "document", "token", "ordinal"}


def _is_skip(entry: Mapping[str, Any]) -> bool:
    texts, numbers = (entry["source"], entry["reason"]), (entry["index"], entry.get("rows") or 0)
    return all(type(text) is str for text in texts) and all(type(number) is int for number in numbers)


@dataclass(frozen=True)
class CommitRecord:
    """The content of one block of one stream.

    rows: the number of rows with tokens, which are the first rows of the block.
    tokens: the number of valid (not padding) tokens.
    documents: the number of rows of the block's document table.
    tokens_cut: how many tokens `batch.long_documents=cut` dropped from these documents.
    skipped: what `data.on_error=skip` left out, as {source, index, reason, rows}, see `SkippedDocument`.
    start, next: the cursors (as JSON) at which this block and the stream's next one start.
    exhausted: the stream has no more documents after this block.
    truncated: `run.max_tokens` ended the block early; a longer run replaces it by a block with the same first rows.
    selected: the number of tokens whose activations are stored; None (absent in the JSON) if those of all are.

    Set by the writer:
    table_sha256, statistics_sha256: of the document table's and the statistics' files ("" without statistics).
    digests: by array, the digest of its values in this block, see `ValuesDigest`.
    blocks_before: the digest of the block table of the stream's earlier blocks.
    """

    stream: int
    block: int
    rows: int
    tokens: int
    documents: int
    tokens_cut: int
    skipped: tuple[Mapping[str, Any], ...]
    start: Mapping[str, int]
    next: Mapping[str, int]
    exhausted: bool
    truncated: bool
    selected: int | None = None
    table_sha256: str = ""
    statistics_sha256: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    blocks_before: str = ""
    version: int = 1

    @property
    def key(self) -> str:
        return commit_key(self.stream, self.block)

    @property
    def activations(self) -> int:
        """Tokens whose activations are stored."""
        return self.tokens if self.selected is None else self.selected

    def is_same_block(self, other: "CommitRecord") -> bool:
        """Whether both records describe the same rows and values. The sha256 of parquet files are not compared, since
        their bytes depend on pyarrow's version."""
        ignored = {"table_sha256": "", "statistics_sha256": ""}
        return replace(self, **ignored) == replace(other, **ignored)

    def names_same_files(self, other: "CommitRecord") -> bool:
        """Whether both records name a document table and statistics with the same bytes."""
        files = (self.table_sha256, self.statistics_sha256)
        return files == (other.table_sha256, other.statistics_sha256)

    def to_json(self) -> bytes:
        """UTF-8 JSON with the keys in a fixed order, and a checksum that reveals edits."""
        content = self._content()
        return (json.dumps(content | {"sha256": json_digest(content)}, indent=1, ensure_ascii=False) + "\n").encode()

    def _content(self) -> dict[str, Any]:
        content = {"version": self.version, **{f.name: getattr(self, f.name) for f in fields(self)}}
        content["skipped"] = [dict(entry) for entry in self.skipped]
        content["start"], content["next"] = dict(self.start), dict(self.next)
        if self.selected is None:
            del content["selected"]
        return content

    def _has_right_types(self) -> bool:
        counts = [getattr(self, name) for name in _COUNTS] + ([] if self.selected is None else [self.selected])
        cursors = [value for cursor in (self.start, self.next) for value in cursor.values()]
        texts = [self.table_sha256, self.statistics_sha256, self.blocks_before, *self.digests.values()]
        return (
            all(type(count) is int and 0 <= count < _MAX_COUNT for count in counts)
            and all(type(value) is int and 0 <= value < _MAX_CURSOR for value in (*cursors, self.tokens_cut))
            and all(type(flag) is bool for flag in (self.exhausted, self.truncated))
            and all(type(text) is str for text in texts)
            and _CURSOR == set(self.start) == set(self.next)
            and all(map(_is_skip, self.skipped))
        )

    @classmethod
    def from_json(cls, text: bytes, subject: str) -> "CommitRecord":
        """Raises StoreInvalid, naming `subject`, for a record that is damaged, edited, or of a different version."""
        content = parse_store_json(text, subject, VERIFY_REMEDY)
        try:
            digest = content.pop("sha256")
            record = cls(**{**content, "skipped": tuple(content["skipped"])})
            is_whole = content.keys() | {"selected"} == {f.name for f in fields(cls)} and record._has_right_types()
        except (KeyError, TypeError, AttributeError) as error:
            raise StoreInvalid(f"{subject} is not a commit record ({error}). {VERIFY_REMEDY}") from error
        if not is_whole or digest != json_digest(content):
            raise StoreInvalid(f"{subject} does not match its own checksum: it was edited or damaged. {VERIFY_REMEDY}")
        if record.version != 1:
            raise StoreInvalid(
                f"{subject} has version {record.version}, expected 1. Use a newer version of this program."
            )
        return record


def commit_key(stream: int, block: int) -> str:
    """The key of a block's commit record, relative to the store."""
    return block_key(COMMITS_PREFIX, stream, block, ".json")


def parse_commit_key(key: str) -> tuple[int, int] | None:
    """The (stream, block) of a commit record's key; None for any other key."""
    match = _KEY.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def read_stream_records(storage: Storage, stream: int, first: int = 0, list_all: bool = True) -> list[CommitRecord]:
    """The records of a stream's committed blocks, from block `first` on.

    Without `list_all` the keys of earlier blocks are not listed, so a gap among those goes unnoticed. Raises
    StoreInvalid for a damaged record or a gap, and StoreError.
    """
    begin = 0 if list_all else first
    for _ in range(2):  # after the listing, another worker may have committed, or withdrawn a truncated record
        blocks = _list_blocks(storage, stream, begin)
        gap = next((index for index, block in enumerate(blocks, begin) if block != index), None)
        keys = [commit_key(stream, block) for block in blocks if block >= first and gap is None]
        records = dict(zip(keys, storage.read_checked(keys, partial(parse_record, storage)), strict=True))
        absent = [key for key, record in records.items() if record is None]
        if gap is None and not absent:
            return list(records.values())
    if gap is None:
        raise StoreError(
            f"{storage.path}/{absent[0]} disappeared twice while it was being read. Run the same command again."
        )
    block = next(block for block in blocks if block > gap)
    raise StoreInvalid(
        f"stream {stream} of {storage.path} has a record of block {block}, but not of block {gap}. "
        f"Delete the stream's records from block {block} on; the next run recomputes these blocks."
    )


def read_commit_records(storage: Storage, blocks: Iterable[tuple[int, int]]) -> Iterator[CommitRecord]:
    """The records of `blocks`, given as (stream, block). Raises StoreInvalid if one is missing or damaged, and
    StoreError."""
    return storage.read_checked([commit_key(*block) for block in blocks], partial(require_record, storage))


def require_record(storage: Storage, key: str, text: bytes | None) -> CommitRecord:
    """Parses the record of a committed block. Raises StoreInvalid if it is missing (`text` is None) or damaged."""
    record = parse_record(storage, key, text)
    if record is None:
        raise StoreInvalid(f"{storage.path}/{key} is missing, although the block is committed. {VERIFY_REMEDY}")
    return record


def _list_blocks(storage: Storage, stream: int, first: int) -> list[int]:
    """The blocks of a stream that have a record, from `first` on, ascending."""
    start = commit_key(stream, first) if first < _KEYS_IN_ORDER else ""
    parsed = filter(None, map(parse_commit_key, storage.list_keys(stream_prefix(COMMITS_PREFIX, stream), start)))
    return sorted(block for _, block in parsed if block >= first)


def parse_record(storage: Storage, key: str, text: bytes | None) -> CommitRecord | None:
    """Parses the record at this key; None if `text` is None. Raises StoreInvalid if it is damaged or belongs to a
    different key."""
    record = None if text is None else CommitRecord.from_json(text, f"{storage.path}/{key}")
    if record is not None and record.key != key:
        raise StoreInvalid(f"{storage.path}/{key} is the record of block {record.block} of stream {record.stream}.")
    return record
