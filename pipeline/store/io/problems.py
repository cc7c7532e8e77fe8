"""The problems that `verify_store` reports, and what to do about each kind."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from pipeline.core.errors import StoreError
from pipeline.store.io.failures import DAMAGE_REMEDY, VERIFY_REMEDY


class Remedy(StrEnum):
    """What to do about a problem: what `verify.repair=true` does, or advice if it can do nothing."""

    recompute = (
        "deletes the commit records of damaged blocks and of all later blocks of their streams, then the damaged "
        "objects. The job's command computes these blocks again."
    )
    finish = (
        "takes the summary out of the root, and deletes what is damaged. The job's command writes it again, and "
        "pipeline.finalize with index=true the index of ids."
    )
    discard = "deletes objects that belong to no committed block, and damaged groups: the next run makes them again."
    other_dtype = (
        "The step produced these values; recomputing them would give the same ones. The largest finite value is 65504 "
        "in float16. Set capture.dtype=bfloat16 or capture.dtype=float32, and a new store.path."
    )

    @property
    def is_repair(self) -> bool:
        """Whether `verify.repair=true` does this."""
        return self is not Remedy.other_dtype


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


@contextmanager
def reported(
    problems: list[Problem], where: str, remedy: Remedy = Remedy.recompute, block: tuple[int, int] | None = None
) -> Iterator[None]:
    """Adds a StoreError of the `with` block to the problems, as one of the object `where`."""
    try:
        yield
    except StoreError as error:
        problems.append(Problem(where, str(error), remedy, block))
