"""Deleting a store's own objects, and nothing else that lies beside them."""

import contextlib
import os
import shutil

import tensorstore as ts

from pipeline.store.claims import CLAIMS_PREFIX, TEST_PREFIX
from pipeline.store.commits import COMMITS_PREFIX
from pipeline.store.group_keys import GENERATED_PREFIX
from pipeline.store.kvstore import local_directory, object_url, open_kvstore, store_errors, write_key
from pipeline.store.metadata import ROOT_KEY, StoreRoot
from pipeline.store.statistics import MERGED_PREFIX, STATISTICS_PREFIX
from pipeline.store.tables import TABLES_PREFIX


def delete_store(path: str, root: StoreRoot) -> None:
    """Deletes the commit records, so that no block is left, then all else, the root last. Raises StoreError."""
    kvstore = open_kvstore(path)
    arrays = [f"{name}/" for name in root.array_names]
    statistics = [STATISTICS_PREFIX, *(f"{MERGED_PREFIX}{name}/" for name in root.arrays)]
    beside = [TABLES_PREFIX, *statistics, "_metrics/", CLAIMS_PREFIX, TEST_PREFIX, GENERATED_PREFIX]
    for prefix in (COMMITS_PREFIX, *arrays, *beside):
        with store_errors(object_url(kvstore, prefix)):
            kvstore.delete_range(ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord("/") + 1))).result()
    write_key(kvstore, f"{MERGED_PREFIX}zarr.json", None)
    write_key(kvstore, ROOT_KEY, None)
    if "://" not in path:
        _remove_folders(local_directory(path), [COMMITS_PREFIX, *arrays, *beside])


def _remove_folders(path: str, prefixes: list[str]) -> None:
    """The folders that are empty now."""
    for prefix in prefixes:
        shutil.rmtree(os.path.join(path, prefix), ignore_errors=True)
    for folder in (os.path.join(path, MERGED_PREFIX), path):
        with contextlib.suppress(OSError):  # there is none, or something else lies in it
            os.rmdir(folder)
