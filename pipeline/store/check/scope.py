"""What is verified: a store, a share of its streams, a sample of the blocks, and how much of each is checked."""

import hashlib
from dataclasses import dataclass
from enum import IntEnum

from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.metadata import StoreRoot
from pipeline.store.io.storage import Storage

_HASH_BYTES = 8


class Level(IntEnum):
    """How much is verified. Each level includes those before it.

    records: the root, the commit records and the table of blocks.
    objects: that all objects of the records exist, and that a complete store has no others.
    checksums: that the objects contain what was written.
    """

    records = 1
    objects = 2
    checksums = 3


@dataclass(frozen=True)
class Scope:
    """What to verify.

    rank, world: check the streams s with s % world == rank; rank 0 also checks what belongs to no stream.
    sample: the fraction of blocks whose objects are read. `seed` and the block's stream and number determine which, so
    that the choice is reproducible.
    """

    rank: int = 0
    world: int = 1
    sample: float = 1.0
    seed: int = 0
    level: Level = Level.checksums

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_everything(self) -> bool:
        return self.world == 1 and self.sample == 1 and self.level is Level.checksums

    def streams(self, num_streams: int) -> range:
        return range(self.rank, num_streams, self.world)

    def has_stream(self, stream: int) -> bool:
        return stream % self.world == self.rank

    def reads_block(self, stream: int, block: int) -> bool:
        if self.level < Level.checksums:
            return False
        digest = hashlib.sha256(f"{self.seed}/{stream}/{block}".encode()).digest()
        return int.from_bytes(digest[:_HASH_BYTES]) < self.sample * 256**_HASH_BYTES


EVERYTHING = Scope()


@dataclass(frozen=True)
class OpenStore:
    """A store whose root can be read, and the layout that the root determines."""

    storage: Storage
    root: StoreRoot
    layout: StoreLayout
