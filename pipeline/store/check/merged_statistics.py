"""Compares a stream's running statistics, and a store's merged statistics, with those of the blocks."""

from collections.abc import Iterator

from pipeline.core.errors import StoreError
from pipeline.store.check.block_checks import check_statistics
from pipeline.store.check.stored_blocks import CheckedBlock, OpenStore
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.problems import Problem, Remedy
from pipeline.store.format.statistics import (
    MERGED_GROUP,
    MERGED_GROUP_KEY,
    BlockStatistics,
    decode_merged,
    merge_arrays,
    merged_digest,
    merged_keys,
    read_running,
    statistics_key,
)
from pipeline.store.io.storage import Storage


class StreamStatistics:
    """Merges the statistics of one stream's checked blocks.

    total: the merged statistics; None once those of a block could not be read, and {} once a block has none. After
    blocks that were not read, it continues with the running statistics of the next block.
    """

    def __init__(self) -> None:
        self.total: BlockStatistics | None = {}
        self._next = 0

    def add(self, block: CheckedBlock) -> Iterator[Problem]:
        """Adds a block, and yields the problems of its running statistics."""
        statistics, number = block.statistics, block.record.block
        if number == 0:
            self.total = statistics
        elif number == self._next:
            self.total = merged(self.total, statistics)
        else:
            self.total = statistics and block.running
        self._next = number + 1
        if self.total and block.running:
            key = statistics_key(block.record.stream, number)
            for name, expected in self.total.items():
                if name not in block.running:
                    yield Problem(key, f"the running statistics of {name} are missing")
                    continue
                yield from (
                    Problem(key, f"running statistics of {name}: {what}")
                    for what in check_statistics(block.running[name], expected)
                )


def merged(first: BlockStatistics | None, second: BlockStatistics | None) -> BlockStatistics | None:
    """The merged statistics of the arrays in both; None if either is None."""
    return None if first is None or second is None else merge_arrays(first, second)


def stored_total(storage: Storage, last: CommitRecord) -> BlockStatistics | None:
    """A stream's statistics, from the file of its last block; {} if a block has none, None if they cannot be read."""
    try:
        return read_running(storage, last) if last.statistics_sha256 else {}
    except StoreError:
        return None


def check_merged(store: OpenStore, total: BlockStatistics | None) -> Iterator[Problem]:
    """Checks that a complete store's `stats/` agree with the blocks' statistics and the root. `total`: the former,
    merged; None if they could not be read."""
    if not store.root.complete or total is None:
        return
    digests = store.root.statistics_digests or {}
    keys = [MERGED_GROUP_KEY, *(key for name in store.layout.summarised for key in merged_keys(name))]
    wrong = [Problem(key, what, Remedy.merge_again) for key in keys if (what := store.storage.file_problem(key))]
    if wrong:
        yield from wrong
        return
    objects = dict(zip(keys, store.storage.read_many(keys), strict=True))
    for name, expected in total.items():
        where = merged_keys(name)[0].removesuffix("zarr.json")
        if merged_digest(objects, name) is None:
            yield Problem(where, "is missing, although the store is complete", Remedy.merge_again)
        elif digests.get(name) != merged_digest(objects, name):
            yield Problem(where, "does not match the digest in the root", Remedy.merge_again)
        else:
            try:
                stored = decode_merged(objects, name)
            except StoreError as error:
                yield Problem(where, str(error), Remedy.merge_again)
                continue
            for what in check_statistics(stored, expected):
                yield Problem(where, what, Remedy.merge_again)
    if total and objects[MERGED_GROUP_KEY] != MERGED_GROUP:
        yield Problem(MERGED_GROUP_KEY, "is missing or was edited", Remedy.merge_again)
