"""The problems that `verify_store` reports, and how to repair each kind."""

from dataclasses import dataclass
from enum import StrEnum


class Remedy(StrEnum):
    """What to do about a problem."""

    recompute = (
        "To repair the store, delete the commit records (_commits/stream-.../block-....json) of these blocks and of "
        "all later blocks of their streams, then run the job again: it computes them "
        "again, with the same result."
    )
    rerun = (
        "An interrupted job leaves arrays with the wrong number of rows: run it again. A zarr.json of an array that "
        "is damaged or edited can be deleted first: the job writes it anew."
    )
    consolidate = (
        "The consolidated records only repeat the commit records: delete _commits/consolidated.jsonl, which the job, "
        "run again, writes anew."
    )
    tabulate = (
        "Block tables only repeat the commit records: delete the file, and the job, run again, writes it anew if it is "
        "needed."
    )
    index_again = (
        "The index of ids only repeats the document tables: delete the file, or run pipeline.index, which writes it "
        "anew."
    )
    other_dtype = (
        "Values that are not finite were computed like that, and would be again: float16 ends at 65504, "
        "float8_e4m3fn at 448, float8_e5m2 at 57344. Choose capture.dtype=bfloat16 or capture.dtype=float32, and a new "
        "store.path."
    )
    discard = (
        "Objects without a commit record were left by a job that was killed. While no job writes to the store they "
        "can be deleted; a job with a larger run.max_tokens replaces them."
    )
    regenerate = (
        "The blocks are sound without it, but computing them again and extending the store need it: delete this group "
        "and the later ones of its stream, and the run that needs them writes them again."
    )
    regenerate_kept = (
        "What was kept while the model wrote can be deleted: the run that needs it writes it again, with the same "
        "result."
    )
    merge_again = (
        "The merged statistics are computed from those of the blocks: delete stats/, and run the job again, which "
        "writes it anew."
    )
    restore = "The store's zarr.json cannot be computed again: restore it from a copy, or choose a new store.path."


@dataclass(frozen=True)
class Problem:
    """Something wrong with the object (or array) `where`, relative to the store."""

    where: str
    what: str
    remedy: Remedy = Remedy.recompute

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"
