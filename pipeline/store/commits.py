"""Commit records: a block is in the store exactly when its record exists.

A record is a small JSON object, written last, after all of the block's arrays and its document table are durable. It
holds nothing that differs from run to run, so a block that is computed again leaves the same bytes.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import tensorstore as ts

from pipeline.errors import StoreError, StoreInvalid
from pipeline.store.kvstore import list_keys, read_keys

COMMITS_PREFIX = "_commits/"
_KEY = re.compile(r"_commits/stream-(\d{5,})/block-(\d{6,})\.json")
_COUNTS = ("version", "stream", "block", "rows", "tokens", "documents", "tokens_cut")
_CURSOR = {"shard", "document", "token", "ordinal"}


@dataclass(frozen=True)
class CommitRecord:
    """What one block of one stream holds.

    rows: rows with tokens, the block's first ones. tokens: valid (not padding) tokens. documents: rows of the block's
    document table. tokens_cut: tokens that `batch.long_documents=cut` dropped from these documents. skipped: the
    documents that `data.on_error=skip` left out, as {source, index, reason}. start, next: the cursors (as JSON) of
    this block and of the stream's next one. exhausted: the stream has no document after this block. truncated:
    `run.max_tokens` ended the block early; a longer run writes it again, with the same first rows. table_sha256: of the
    document table's file; the writer fills it in.
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
    table_sha256: str = ""
    version: int = 1

    @property
    def key(self) -> str:
        return commit_key(self.stream, self.block)

    def to_json(self) -> bytes:
        """UTF-8 JSON with a stable order of keys and a checksum of the rest, so that an edited record is noticed."""
        content = {"version": self.version, **{f.name: getattr(self, f.name) for f in fields(self)}}
        content["skipped"] = [dict(entry) for entry in self.skipped]
        content["start"], content["next"] = dict(self.start), dict(self.next)
        content["sha256"] = _digest(content)
        return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes, subject: str) -> "CommitRecord":
        """Raises StoreInvalid, naming `subject`, for a record that is damaged, edited, or of another version."""
        try:
            content = json.loads(text)
            digest = content.pop("sha256")
            record = cls(**{**content, "skipped": tuple(content["skipped"])})
            sound = all(type(content[name]) is int for name in _COUNTS)
            sound = sound and _CURSOR == set(record.start) == set(record.next)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreInvalid(f"{subject} is not a commit record ({error}). {_REMEDY}") from error
        if not sound or digest != _digest(content):
            raise StoreInvalid(f"{subject} does not match its own checksum: it was edited or damaged. {_REMEDY}")
        if record.version != 1:
            raise StoreInvalid(f"{subject} has version {record.version}; this program reads version 1.")
        return record


_REMEDY = "Delete the record: the block is then computed again."


def commit_key(stream: int, block: int) -> str:
    """The record's key, relative to the store."""
    return f"{COMMITS_PREFIX}stream-{stream:05d}/block-{block:06d}.json"


def parse_commit_key(key: str) -> tuple[int, int] | None:
    """(stream, block) of a record's key; None for any other key."""
    match = _KEY.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def read_records(path: str, kvstore: ts.KvStore) -> dict[int, list[CommitRecord]]:
    """The committed blocks by stream, in order.

    Raises StoreInvalid for a damaged record, and for a stream whose blocks are not 0, 1, 2, ...
    """
    found = _read_all(kvstore)
    if _seems_inconsistent(found):  # because another worker committed, or withdrew a truncated record, meanwhile?
        found = _read_all(kvstore)
    records: dict[int, list[CommitRecord]] = {}
    for (stream, block), text in found.items():
        key = commit_key(stream, block)
        if text is None:
            raise StoreError(f"{path}/{key} disappeared while it was being read, twice. Run the same command again.")
        record = CommitRecord.from_json(text, f"{path}/{key}")
        if (record.stream, record.block) != (stream, block):
            raise StoreInvalid(f"{path}/{key} is the record of block {record.block} of stream {record.stream}.")
        before = records.setdefault(stream, [])
        if block != len(before):
            raise StoreInvalid(
                f"stream {stream} of {path} has a record of block {block}, but none of block {len(before)}. "
                f"Delete the stream's records from block {block} on: these blocks are then computed again."
            )
        before.append(record)
    return records


def _read_all(kvstore: ts.KvStore) -> dict[tuple[int, int], bytes | None]:
    """What each record holds, by (stream, block), in order; None for one that was deleted after it was listed."""
    places = sorted(filter(None, map(parse_commit_key, list_keys(kvstore, COMMITS_PREFIX))))
    texts = read_keys(kvstore, [commit_key(*place) for place in places])
    return dict(zip(places, texts, strict=True))


def _seems_inconsistent(found: Mapping[tuple[int, int], bytes | None]) -> bool:
    gap = any(block and (stream, block - 1) not in found for stream, block in found)
    return gap or None in found.values()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
