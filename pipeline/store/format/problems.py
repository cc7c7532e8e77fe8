"""The problems that `verify_store` reports, and how to repair each kind."""

from dataclasses import dataclass
from enum import StrEnum

from pipeline.store.io.failures import DAMAGE_REMEDY, VERIFY_REMEDY


class Remedy(StrEnum):
    """What to do about a problem."""

    recompute = (
        "To repair the store, delete the commit records of the damaged blocks and of all later blocks of their "
        "streams, then run the job again: it recomputes them with the same result."
    )
    rerun_missing = "To repair the store, run the job again: it computes what is missing."
    rerun = "An interrupted job leaves arrays with the wrong number of rows: run it again."
    rewrite_array = (
        "Delete an array's zarr.json (not the store's own) that is damaged or edited, and run the job again: it writes "
        "a new one."
    )
    tabulate = (
        "Block tables only repeat the commit records: delete the file. The next run of the job writes it again if it "
        "is needed."
    )
    index_again = (
        "The index of ids only repeats the document tables: delete the file, or run pipeline.index to write it again."
    )
    other_dtype = (
        "The step produced these values; recomputing them would give the same ones. The largest finite value is 65504 "
        "in float16. Set capture.dtype=bfloat16 or capture.dtype=float32, and a new store.path."
    )
    discard = (
        "Objects without a commit record are from a job that was killed. They can be deleted while no job writes to "
        "the store; a job with a larger run.max_tokens replaces them."
    )
    regenerate = (
        "The blocks are valid without it, but recomputing them or extending the store needs it. Delete this group and "
        "all later groups of its stream: the next run that needs them generates them again."
    )
    regenerate_kept = (
        "Activations kept during generation can be deleted: the next run that needs them computes them again, with the "
        "same result."
    )
    merge_again = (
        "The merged statistics are computed from those of the blocks: delete stats/ and run the job again to rewrite "
        "it."
    )
    restore = "The store's root zarr.json cannot be recomputed: restore it from a copy, or set a new store.path."


@dataclass(frozen=True)
class Problem:
    """A problem with an object or array. `where`: its key, relative to the store."""

    where: str
    what: str
    remedy: Remedy = Remedy.recompute

    def __str__(self) -> str:
        """The key and the problem, without the advice to run pipeline.verify, which prints this."""
        return f"{self.where}: {self.what}".removesuffix(f" {DAMAGE_REMEDY}").removesuffix(f" {VERIFY_REMEDY}")
