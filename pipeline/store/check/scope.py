"""What is verified: a store, a share of its streams, and a sample of the blocks."""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.metadata import StoreRoot
from pipeline.store.io.storage import Storage

_HASH_BYTES = 8


@dataclass(frozen=True)
class Scope:
    """What to verify.

    rank, world: check the streams s with s % world == rank; rank 0 also checks what belongs to no stream.
    sample: the fraction of blocks whose objects are read; with 0, only the root, records and listings are. `seed` and
    the block's stream and number determine which, so that the choice is reproducible.
    """

    rank: int = 0
    world: int = 1
    sample: float = 1.0
    seed: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_everything(self) -> bool:
        return self.world == 1 and self.sample == 1

    def has_stream(self, stream: int) -> bool:
        return stream % self.world == self.rank

    def reads_block(self, stream: int, block: int) -> bool:
        digest = hashlib.sha256(f"{self.seed}/{stream}/{block}".encode()).digest()
        return int.from_bytes(digest[:_HASH_BYTES]) < self.sample * 256**_HASH_BYTES


EVERYTHING = Scope()


class OpenStore(NamedTuple):
    """A store whose root can be read, and the layout that the root determines."""

    storage: Storage
    root: StoreRoot
    layout: StoreLayout
