"""What one verification of a store covers: its share of the streams, a sample of the blocks, and how much of each."""

import hashlib
from dataclasses import dataclass
from enum import IntEnum

_HASH_BYTES = 8


class Level(IntEnum):
    """How much is verified; each level includes those before it.

    records: the root, the commit records and the block tables. objects: the objects that the records need exist, and a
    complete store has no others. checksums: what is in them is what was written. all: it agrees with the rest.
    """

    records = 1
    objects = 2
    checksums = 3
    all = 4


@dataclass(frozen=True)
class Scope:
    """A share of the work is the streams s with s % world == rank; what belongs to no stream is that of rank 0.

    sample: the share of the blocks whose objects are read. The seed and the block's place decide which these are, so
    that the same ones are read again.
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
