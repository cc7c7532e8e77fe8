"""What is verified, and the problems that are found."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pipeline.core.errors import StoreError
from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.metadata import StoreRoot
from pipeline.store.io.failures import DAMAGE_REMEDY, VERIFY_REMEDY
from pipeline.store.io.storage import Storage

MISSING = "is missing, although the block is committed"
_HASH_BYTES = 8


class Remedy(StrEnum):
    """What `verify.repair=true` does about a problem."""

    recompute = (
        "deletes the commit records of damaged blocks and of all later blocks of their streams, then the damaged "
        "objects. The job's command computes these blocks again."
    )
    finish = (
        "takes the summary out of the root, and deletes what is damaged. The job's command writes it again, and "
        "pipeline.finalize with index=true the index of ids."
    )
    discard = "deletes objects that belong to no committed block, and damaged groups: the next run makes them again."


@dataclass(frozen=True)
class Problem:
    """A problem with an object or array.

    where: its key, relative to the store. block: the stream and the block to which it belongs, if any; of a stream that
    lacks a record, the first block without one.
    """

    where: str
    what: str
    remedy: Remedy = Remedy.recompute
    block: tuple[int, int] | None = None

    def __str__(self) -> str:
        """The key and the problem, without the advice to run pipeline.verify, which prints this."""
        return f"{self.where}: {self.what}".removesuffix(f" {DAMAGE_REMEDY}").removesuffix(f" {VERIFY_REMEDY}")


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

    def problems(
        self,
        where: str,
        check: Callable[[], object],
        remedy: Remedy = Remedy.recompute,
        block: tuple[int, int] | None = None,
    ) -> list[Problem]:
        """The problem of the object `where` if `check()` raises a StoreError, also when it is called again."""
        try:
            self.storage.retry_read(check)
        except StoreError as error:
            return [Problem(where, str(error), remedy, block)]
        return []
