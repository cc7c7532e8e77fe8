"""Reads and checks the objects of one block."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.check.problems import MISSING, OpenStore, Problem
from pipeline.store.format.commits import CommitRecord, commit_key, read_commit_records
from pipeline.store.format.layout import ArraySpec, StoreLayout
from pipeline.store.format.statistics import read_stream_statistics, statistics_key
from pipeline.store.format.tables import decode_table, table_key
from pipeline.store.indexes.features import check_index, index_key
from pipeline.store.io.shards import decoded_chunks, values_digest
from pipeline.store.io.storage import Storage

_ROUNDING = 0.01  # by this, rounded outputs may be out of range


def check_block(store: OpenStore, stream: int, block: int) -> list[Problem]:
    """Reads and checks a block. Returns its problems.

    A block with problems in remote storage is checked a second time: a request may have failed, and repairing would
    delete a sound block.
    """
    problems = _check_block_once(store, stream, block)
    return _check_block_once(store, stream, block) if problems and store.storage.is_remote else problems


def _check_block_once(store: OpenStore, stream: int, block: int) -> list[Problem]:
    place, storage = (stream, block), store.storage
    try:
        record = next(read_commit_records(storage, [place]))
    except StoreError as error:
        return [Problem(commit_key(*place), str(error), block=place)]
    checks: dict[str, Callable[[], object]] = {
        table_key(*place): lambda: decode_table(storage.read(table_key(*place)), record)
    }
    if record.statistics_sha256:
        checks[statistics_key(*place)] = lambda: read_stream_statistics(storage, record)
    for sae in store.root.metadata.encoders if store.root.metadata.indexed_features else ():
        key = index_key(sae["features"], *place)
        checks[key] = partial(_check_index, storage, sae, key)
    problems = [problem for key, check in checks.items() for problem in store.problems(key, check, block=place)]
    return problems + [problem for spec in store.layout.all_arrays for problem in _check_array(store, spec, record)]


def shard_keys(layout: StoreLayout, spec: ArraySpec, stream: int, block: int) -> list[str]:
    """The keys of a block's store shards, in the order of its values."""
    return [layout.shard_key(spec, stream, block, part) for part in range(layout.num_parts(spec))]


def _check_index(storage: Storage, sae: Mapping[str, Any], key: str) -> None:
    check_index(storage.read(key), sae["width"], np.dtype(sae["dtype"]), key)


def _check_array(store: OpenStore, spec: ArraySpec, record: CommitRecord) -> list[Problem]:
    """What is wrong with a block of an array: its shards, or the digest of its values."""
    place = record.stream, record.block
    checksums: list[bytes] = []
    problems: list[Problem] = []
    keys = shard_keys(store.layout, spec, *place)
    for key in keys:
        problems += store.problems(key, lambda key=key: checksums.extend(_check_shard(store, spec, key)), block=place)
    digest, expected = values_digest(checksums), record.digests.get(spec.name)
    if problems or digest == expected:
        return problems
    what = f"the digest of the block's values is {digest}, but the block's record has {expected}"
    return [Problem(key, what, block=place) for key in keys]


def _check_shard(store: OpenStore, spec: ArraySpec, key: str) -> list[bytes]:
    """The checksums of a store shard's chunks. Raises StoreInvalid if it is missing or damaged, or has values that are
    out of range, and StoreError."""

    def read(start: int, stop: int | None) -> bytes:
        [content] = store.storage.read_many([key], [(start, stop)])
        if content is None:
            raise StoreInvalid(MISSING)
        return content

    checksums, bounds = [], _bounds(store, spec)
    try:
        for values, chunk_checksum in decoded_chunks(read, store.layout.shard_format(spec)):
            checksums.append(chunk_checksum)
            if bounds is not None and values is not None:
                bad = (values < bounds[0] - _ROUNDING) | (values > bounds[1] + _ROUNDING)
                if bad.any():
                    raise ValueError(f"{bad.sum()} values are not within {bounds[0]:g} to {bounds[1]:g}")
    except ValueError as error:
        raise StoreInvalid(str(error)) from error
    return checksums


def _bounds(store: OpenStore, spec: ArraySpec) -> tuple[float, float] | None:
    """The least and the largest value of outputs, and of the errors of an SAE's reconstruction."""
    if spec not in store.layout.outputs:
        return None
    vocab_size = store.root.metadata.model.get("vocab_size")
    return {
        "loss": (0, math.inf),
        "entropy": (0, math.log(vocab_size) if type(vocab_size) is int and vocab_size > 0 else math.inf),
        "top_logprobs": (-math.inf, 0),
        "squared_error": (0, math.inf),
        "cosine": (-1, 1),
    }.get(spec.name.rpartition(".")[2])
