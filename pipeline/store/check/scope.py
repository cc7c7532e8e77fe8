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

    def notes(self, num_streams: int) -> list[str]:
        """A sentence about each thing that is not checked."""
        notes = []
        if self.world > 1:
            num_checked = len(range(self.rank, num_streams, self.world))
            rank_0 = "" if self.is_first else "; rank 0 also checks the arrays and what is merged over all streams"
            notes.append(
                f"rank {self.rank} of {self.world} checks {num_checked} of {num_streams} streams{rank_0}. The store is "
                "sound if no rank finds a problem"
            )
        if self.sample < 1:
            notes.append(
                f"verify.sample={self.sample:g}: outside the sample, only blocks' records and the existence of their "
                "objects are checked"
            )
        return notes


EVERYTHING = Scope()


class OpenStore(NamedTuple):
    """A store whose root can be read, and the layout that the root determines."""

    storage: Storage
    root: StoreRoot
    layout: StoreLayout
