"""The index of a stream's ids: by the hash of each id, the blocks whose document table has it.

A header, then pages of sorted entries, each followed by a crc32c. Hashes are uniform, so a hash's place among n entries
is known but for a few times sqrt(n): a reader takes some pages, whatever the number of blocks. Nothing is in it that
the document tables do not say.
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
    """The key, relative to the store, of the index of a stream's ids."""
    return f"{IDS_PREFIX}stream-{stream:05d}.ids"


def id_hash(id: str) -> int:
    """The first 64 bits of the sha256 of an id."""
    return int.from_bytes(hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def block_entries(ids: Iterable[str], block: int) -> Entries:
    """The entries of a block's documents, not sorted."""
    hashes = [id_hash(id) for id in ids]
    entries = np.empty(len(hashes), ENTRY)
    entries["hash"], entries["block"] = hashes, block
    return entries


def sorted_entries(parts: Sequence[Entries]) -> Entries:
    """The entries of several blocks, by hash and then by block."""
    return np.sort(np.concatenate([np.empty(0, ENTRY), *parts]), order=["hash", "block"])


class IndexHeader(NamedTuple):
    """What an index is of. num_blocks: the stream's first ones. before, blocks: sha256 of the elements of the block
    table (`BlockTable.digest`) of all of them but the last, and of all. checksum: of the object's key and these."""

    num_blocks: int
    num_entries: int
    before: bytes
    blocks: bytes
    checksum: int

    @classmethod
    def of(cls, table: BlockTable, num_entries: int, key: str) -> Self:
        """The header of an index of all blocks of a stream."""
        fields = (len(table), num_entries, *(bytes.fromhex(part.digest()) for part in (table[:-1], table)))
        return cls(*fields, crc32c(_HEADER.pack(_MAGIC, *fields), crc32c(key.encode())))

    @classmethod
    def decode(cls, content: bytes, key: str) -> Self:
        """Raises StoreInvalid for a header that is damaged, or another object's."""
        if len(content) == HEADER_BYTES:
            checked, checksum = content[: _HEADER.size], int.from_bytes(content[_HEADER.size :], "little")
            magic, *fields = _HEADER.unpack(checked)
            if magic == _MAGIC and checksum == crc32c(checked, crc32c(key.encode())):
                return cls(*fields, checksum)
        raise StoreInvalid(f"{key} does not begin as an index of ids does. {DAMAGE_REMEDY}")

    def num_known(self, table: BlockTable) -> int | None:
        """How many of the stream's first blocks, whose block table this is, the index has. All but its last one, where
        that was truncated and has been written again. None where it is of other blocks."""
        for num_blocks, digest in ((self.num_blocks, self.blocks), (self.num_blocks - 1, self.before)):
            if 0 <= num_blocks <= len(table) and bytes.fromhex(table[:num_blocks].digest()) == digest:
                return num_blocks
        return None

    @property
    def num_pages(self) -> int:
        return -(-self.num_entries // PAGE_ENTRIES)

    def pages_near(self, hash: int, slack: int) -> range:
        """The pages with the entries up to `slack` from where a hash would be if the gaps between all were equal."""
        at = hash * self.num_entries >> 64
        first, last = max(0, at - slack) // PAGE_ENTRIES, (at + slack) // PAGE_ENTRIES
        return range(first, min(last + 1, self.num_pages))

    def encode(self, entries: Entries) -> bytes:
        """The index file with these entries, which are sorted."""
        header = _HEADER.pack(_MAGIC, *self[:-1])
        parts = [header, self.checksum.to_bytes(_CRC_BYTES, "little")]
        for page in range(self.num_pages):
            content = entries[page * PAGE_ENTRIES : (page + 1) * PAGE_ENTRIES].tobytes()
            parts += [content, self._page_checksum(content, page)]
        return b"".join(parts)

    def byte_range(self, pages: range) -> tuple[int, int]:
        """The bytes of the file that hold some pages."""
        end = HEADER_BYTES + self.num_entries * ENTRY.itemsize + self.num_pages * _CRC_BYTES
        return HEADER_BYTES + pages.start * _PAGE_BYTES, min(HEADER_BYTES + pages.stop * _PAGE_BYTES, end)

    def decode_pages(self, content: bytes, pages: range, key: str) -> Entries:
        """The entries of some pages. Raises StoreInvalid for damaged ones, or those of another index."""
        first, end = self.byte_range(pages)
        parts = [content[at : at + _PAGE_BYTES] for at in range(0, len(content), _PAGE_BYTES)]
        is_sound = len(content) == end - first and all(
            part[-_CRC_BYTES:] == self._page_checksum(part[:-_CRC_BYTES], page)
            for part, page in zip(parts, pages, strict=True)
        )
        if not is_sound:
            raise StoreInvalid(f"{key} does not match its own checksums: it is damaged. {DAMAGE_REMEDY}")
        return np.frombuffer(b"".join(part[:-_CRC_BYTES] for part in parts), ENTRY)

    def _page_checksum(self, content: bytes, page: int) -> bytes:
        checksum = crc32c(content, crc32c(page.to_bytes(8, "little"), self.checksum))
        return checksum.to_bytes(_CRC_BYTES, "little")


def read_headers(storage: Storage, streams: Sequence[int]) -> Iterator[IndexHeader | None]:
    """The headers of streams' indexes, None of a stream without one. Raises StoreInvalid for a damaged one, and
    StoreError."""
    keys = list(map(ids_key, streams))
    for key, content in zip(keys, storage.read_many(keys, [(0, HEADER_BYTES)] * len(keys)), strict=True):
        yield None if content is None else IndexHeader.decode(content, key)


def decode_index(content: bytes, key: str) -> tuple[IndexHeader, Entries]:
    """A whole index file. Raises StoreInvalid for a damaged one."""
    header = IndexHeader.decode(content[:HEADER_BYTES], key)
    return header, header.decode_pages(content[HEADER_BYTES:], range(header.num_pages), key)
