"""Compares a store's merged statistics with the root."""

from collections.abc import Iterator

from pipeline.store.check.stored_blocks import OpenStore
from pipeline.store.format.problems import Problem, Remedy
from pipeline.store.format.statistics import MERGED_GROUP, MERGED_GROUP_KEY, merged_digest, merged_keys


def check_merged(store: OpenStore) -> Iterator[Problem]:
    """Checks that a complete store's `stats/` match the digests in the root."""
    digests = store.root.statistics_digests or {}
    if not digests:
        return
    keys = [MERGED_GROUP_KEY, *(key for name in digests for key in merged_keys(name))]
    wrong = [Problem(key, what, Remedy.merge_again) for key in keys if (what := store.storage.file_problem(key))]
    if wrong:
        yield from wrong
        return
    objects = dict(zip(keys, store.storage.read_many(keys), strict=True))
    for name, expected in digests.items():
        if (digest := merged_digest(objects, name)) != expected:
            what = "does not match the digest in the root" if digest else "is missing, although the store is complete"
            yield Problem(merged_keys(name)[0].removesuffix("zarr.json"), what, Remedy.merge_again)
    if objects[MERGED_GROUP_KEY] != MERGED_GROUP:
        yield Problem(MERGED_GROUP_KEY, "is missing or was edited", Remedy.merge_again)
