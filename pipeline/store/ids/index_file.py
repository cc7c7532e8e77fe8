"""The index of a stream's ids: for the hash of each id, the blocks whose document table has it.

The file has a header, followed by pages of sorted entries, each with a crc32c. Hashes are uniformly distributed, so the
position of a hash among n entries is known to within a few times sqrt(n), and a reader reads only a few pages. The
index only repeats what the document tables contain.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
from crc32c import crc32c
from jaxtyping import Shaped

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.keys import IDS_PREFIX
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.storage import Storage

ENTRY = np.dtype([("hash", "<u8"), ("block", "<u4")])  # packed: 12 bytes
PAGE_ENTRIES = 256

_MAGIC = b"ids\x00\x00\x00\x00\x01"
_HEADER = struct.Struct("<8sQQ32s32s")
_CRC_BYTES = 4
HEADER_BYTES = _HEADER.size + _CRC_BYTES
_PAGE_BYTES = PAGE_ENTRIES * ENTRY.itemsize + _CRC_BYTES

Entries = Shaped[np.ndarray, " n"]  # of ENTRY


def ids_key(stream: int) -> str:
    """The key of the index of a stream's ids, relative to the store."""
    return f"{IDS_PREFIX}stream-{stream:05d}.ids"


def id_hash(id: str) -> int:
    """The first 64 bits of the sha256 of an id."""
    return int.from_bytes(hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def block_entries(ids: Iterable[str], block: int) -> Entries:
    """The entries of a block's documents, unsorted."""
    hashes = [id_hash(id) for id in ids]
    entries = np.empty(len(hashes), ENTRY)
    entries["hash"], entries["block"] = hashes, block
    return entries


def sorted_entries(parts: Sequence[Entries]) -> Entries:
    """The entries of several blocks, sorted by hash and block."""
    return np.sort(np.concatenate([np.empty(0, ENTRY), *parts]), order=["hash", "block"])


class IndexHeader(NamedTuple):
    """The header of an index of a stream's first blocks.

    num_blocks, num_entries: the number of these blocks, and of entries.
    before, blocks: the `BlockTable.digest` of all these blocks but the last, and of all of them.
    checksum: a crc32c of the object's key and these fields.
    """

    num_blocks: int
    num_entries: int
    before: bytes
    blocks: bytes
    checksum: int

    @classmethod
    def of(cls, table: BlockTable, num_entries: int, key: str) -> Self:
        """The header of an index of all blocks in a stream's `table`."""
        fields = (len(table), num_entries, *(bytes.fromhex(part.digest()) for part in (table[:-1], table)))
        return cls(*fields, crc32c(_HEADER.pack(_MAGIC, *fields), crc32c(key.encode())))

    @classmethod
    def decode(cls, content: bytes, key: str) -> Self:
        """Raises StoreInvalid if the header is damaged, or belongs to a different key."""
        if len(content) == HEADER_BYTES:
            checked, checksum = content[: _HEADER.size], int.from_bytes(content[_HEADER.size :], "little")
            magic, *fields = _HEADER.unpack(checked)
            if magic == _MAGIC and checksum == crc32c(checked, crc32c(key.encode())):
                return cls(*fields, checksum)
        raise StoreInvalid(f"{key} does not have the header of an index of ids. {DAMAGE_REMEDY}")

    def num_known(self, table: BlockTable) -> int | None:
        """How many of the first blocks in a stream's `table` the index covers; None if it was made from other blocks.
        Its last block does not count if it was truncated then and has been replaced since."""
        for num_blocks, digest in ((self.num_blocks, self.blocks), (self.num_blocks - 1, self.before)):
            if 0 <= num_blocks <= len(table) and bytes.fromhex(table[:num_blocks].digest()) == digest:
                return num_blocks
        return None

    @property
    def num_pages(self) -> int:
        return -(-self.num_entries // PAGE_ENTRIES)

    def pages_near(self, hash: int, slack: int) -> range:
        """The pages with the entries up to `slack` from a hash's position if all gaps between hashes were equal."""
        position = hash * self.num_entries >> 64
        first, last = max(0, position - slack) // PAGE_ENTRIES, (position + slack) // PAGE_ENTRIES
        return range(first, min(last + 1, self.num_pages))

    def encode(self, entries: Entries) -> bytes:
        """The content of the index file with these sorted entries."""
        header = _HEADER.pack(_MAGIC, *self[:-1])
        parts = [header, self.checksum.to_bytes(_CRC_BYTES, "little")]
        for page in range(self.num_pages):
            content = entries[page * PAGE_ENTRIES : (page + 1) * PAGE_ENTRIES].tobytes()
            parts += [content, self._page_checksum(content, page)]
        return b"".join(parts)

    def byte_range(self, pages: range) -> tuple[int, int]:
        """The range of bytes of pages in the file."""
        end = HEADER_BYTES + self.num_entries * ENTRY.itemsize + self.num_pages * _CRC_BYTES
        return HEADER_BYTES + pages.start * _PAGE_BYTES, min(HEADER_BYTES + pages.stop * _PAGE_BYTES, end)

    def decode_pages(self, content: bytes, pages: range, key: str) -> Entries:
        """The entries of pages. Raises StoreInvalid if they are damaged, or belong to a different index."""
        first, end = self.byte_range(pages)
        parts = [content[start : start + _PAGE_BYTES] for start in range(0, len(content), _PAGE_BYTES)]
        is_valid = len(content) == end - first and all(
            part[-_CRC_BYTES:] == self._page_checksum(part[:-_CRC_BYTES], page)
            for part, page in zip(parts, pages, strict=True)
        )
        if not is_valid:
            raise StoreInvalid(f"{key} does not match its own checksums. {DAMAGE_REMEDY}")
        return np.frombuffer(b"".join(part[:-_CRC_BYTES] for part in parts), ENTRY)

    def _page_checksum(self, content: bytes, page: int) -> bytes:
        checksum = crc32c(content, crc32c(page.to_bytes(8, "little"), self.checksum))
        return checksum.to_bytes(_CRC_BYTES, "little")


def read_headers(storage: Storage, streams: Sequence[int]) -> Iterator[IndexHeader | None]:
    """The headers of streams' indexes; None for a stream without an index. Raises StoreInvalid if one is damaged, and
    StoreError."""
    keys = list(map(ids_key, streams))
    for key, content in zip(keys, storage.read_many(keys, [(0, HEADER_BYTES)] * len(keys)), strict=True):
        yield None if content is None else IndexHeader.decode(content, key)


def decode_index(content: bytes, key: str) -> tuple[IndexHeader, Entries]:
    """Decodes a whole index file. Raises StoreInvalid if it is damaged."""
    header = IndexHeader.decode(content[:HEADER_BYTES], key)
    return header, header.decode_pages(content[HEADER_BYTES:], range(header.num_pages), key)
