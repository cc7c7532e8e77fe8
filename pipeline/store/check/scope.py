"""The scope of a verification: a share of the streams, a sample of the blocks, and how much of each is checked."""

import hashlib
from dataclasses import dataclass
from enum import IntEnum

_HASH_BYTES = 8


class Level(IntEnum):
    """How much is verified. Each level includes those before it.

    records: the root, the commit records and the block tables.
    objects: that all objects of the records exist, and that a complete store has no others.
    checksums: that the objects contain what was written.
    all: that their values agree with each other.
    """

    records = 1
    objects = 2
    checksums = 3
    all = 4


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
    level: Level = Level.all

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_everything(self) -> bool:
        return self.world == 1 and self.sample == 1 and self.level is Level.all

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
