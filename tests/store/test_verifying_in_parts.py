"""Shares, samples and levels of verification. The shares of all ranks find what a single run finds."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeline.core.errors import PipelineError
from pipeline.store.check import object_listings
from pipeline.store.check.scope import Level, Scope
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.block_table import TABLE_KEY, stream_table_key
from pipeline.store.format.commits import COMMITS_PREFIX, CommitRecord, commit_key
from pipeline.store.format.statistics import statistics_key
from pipeline.store.format.tables import table_key
from pipeline.store.io.storage import Storage
from tests.store.damage_fuzzer import damaged
from tests.store.damage_stores import SAMPLED_KINDS, sampled_specimen
from tests.store.example_store import blocks, copy_store, flip, in_memory

SHARD = "embed/c/1/0/0"  # in the example store: block 0 of stream 1
RESID = "blocks.1.resid_post/c"  # in the other stores


def found(path: str, **scope) -> set[tuple[str, str]]:
    """The problems that one verification finds, or its error."""
    try:
        return {(problem.where, problem.what) for problem in verify_store(path, scope=Scope(**scope))}
    except PipelineError as error:
        return {(type(error).__name__, str(error))}


@pytest.mark.parametrize("kind", SAMPLED_KINDS)
def test_all_shares_together_find_what_one_run_finds(kind):
    """With more ranks than streams."""
    specimen = sampled_specimen(kind)
    with in_memory(specimen.image) as path:
        assert [found(path, rank=rank, world=3) for rank in range(3)] == [set()] * 3
    for seed in range(12):
        operator, damage, image = damaged(random.Random(f"parts {kind} {seed}"), specimen)
        with in_memory(image) as path:
            shares = [found(path, rank=rank, world=3) for rank in range(3)]
            assert set.union(*shares) == found(path), f"{operator}: {damage.what}"


def edit(key: str) -> Callable[[Storage], None]:
    return lambda storage: flip(storage, key)


def delete(key: str) -> Callable[[Storage], None]:
    return lambda storage: storage.write(key, None)


def copy(source: str, target: str) -> Callable[[Storage], None]:
    return lambda storage: storage.write(target, storage.read(source))


def edit_record(storage: Storage) -> None:
    """Edits a record and updates its checksum."""
    key = commit_key(1, 0)
    storage.write(key, replace(CommitRecord.from_json(storage.read(key), key), rows=1).to_json())


# The damage, the object that verify reports (perhaps among others), and the first level that does.
DAMAGE = {
    "record": (edit(commit_key(1, 0)), commit_key(1, 0), Level.records),
    "deleted record": (delete(commit_key(1, 0)), f"{COMMITS_PREFIX}stream-00001", Level.records),
    "record of no stream": (copy(commit_key(1, 0), commit_key(7, 0)), commit_key(7, 0), Level.records),
    "no record": (copy(TABLE_KEY, f"{COMMITS_PREFIX}notes"), f"{COMMITS_PREFIX}notes", Level.records),
    "block table": (edit(TABLE_KEY), TABLE_KEY, Level.records),
    "stream's table": (edit(stream_table_key(1)), stream_table_key(1), Level.records),
    "deleted shard": (delete(f"{RESID}/1/0/0"), f"{RESID}/1/0/0", Level.objects),
    "deleted document table": (delete(table_key(1, 0)), table_key(1, 0), Level.objects),
    "deleted statistics": (delete(statistics_key(1, 0)), statistics_key(1, 0), Level.objects),
    "shard of no block": (copy(f"{RESID}/1/0/0", f"{RESID}/77/0/0"), f"{RESID}/77/0/0", Level.objects),
    "no shard": (copy(f"{RESID}/1/0/0", f"{RESID}/notes"), f"{RESID}/notes", Level.objects),
    "table of no block": (copy(f"{RESID}/1/0/0", table_key(1, 9)), table_key(1, 9), Level.objects),
    "table of no stream": (copy(f"{RESID}/1/0/0", table_key(9, 0)), table_key(9, 0), Level.objects),
    "array": (delete("blocks.1.resid_post/zarr.json"), "blocks.1.resid_post/zarr.json", Level.objects),
    "shard": (edit(f"{RESID}/1/0/0"), f"{RESID}/1/0/0", Level.checksums),
    "exchanged shard": (copy(f"{RESID}/0/0/0", f"{RESID}/1/0/0"), f"{RESID}/1/0/0", Level.checksums),
    "document table": (edit(table_key(1, 0)), table_key(1, 0), Level.checksums),
    "statistics": (edit(statistics_key(1, 0)), statistics_key(1, 0), Level.checksums),
    "merged statistics": (delete("stats/blocks.1.resid_post/c/0/0"), "stats/blocks.1.resid_post/", Level.checksums),
    "record of other rows": (edit_record, commit_key(1, 0), Level.all),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_each_level_finds_its_damage(name):
    damage, where, first = DAMAGE[name]
    with in_memory(sampled_specimen("int8").image) as path:
        damage(Storage.open(path))
        for level in Level:
            places = {place for place, _ in found(path, level=level)}
            assert (where in places) == (level >= first), level


def test_only_the_rank_with_the_stream_reports_its_damage(store_path):
    copy_store(store_path)
    flip(store_path, SHARD)
    assert found(store_path, rank=0, world=2) == set()
    assert {where for where, _ in found(store_path, rank=1, world=2)} == {SHARD}


def test_a_sample_is_reproducible_and_finds_all_missing_objects(store_path):
    copy_store(store_path)
    places = [(s, block.record.block) for s in range(2) for block in blocks(s)]
    counts = set()
    for seed in range(8):
        calls: list[tuple[int, int]] = []
        scope = Scope(sample=0.5, seed=seed)
        assert verify_store(store_path, lambda done, total, calls=calls: calls.append((done, total)), scope=scope) == []
        expected = [place for place in places if scope.reads_block(*place)]
        assert calls == [(k, len(expected)) for k in range(1, len(expected) + 1)]
        counts.add(tuple(expected))
    assert len(counts) > 1
    for key in (SHARD, table_key(0, 1)):
        Storage.open(store_path).write(key, None)
    assert {where for where, _ in found(store_path, sample=1e-9)} == {SHARD, table_key(0, 1)}


def test_a_sampled_block_is_checked_as_a_whole(store_path):
    copy_store(store_path)
    seeds = {Scope(sample=0.5, seed=seed).reads_block(1, 0): seed for seed in range(16)}
    flip(store_path, SHARD)
    assert found(store_path, sample=0.5, seed=seeds[False]) == set()
    assert {where for where, _ in found(store_path, sample=0.5, seed=seeds[True])} == {SHARD}


def test_keys_listed_in_parts_give_the_same_problems(store_path, monkeypatch):
    """Arrays with many store shards are listed in parts."""
    copy_store(store_path)
    storage = Storage.open(store_path)
    others = ["embed/c/-1", "embed/c/notes", "embed/c/9/0/0", "embed/c/07/0/0"]
    for key in others:
        storage.write(key, b"")
    delete(SHARD)(storage)
    expected = found(store_path, level=Level.objects)
    assert {where for where, _ in expected} == {SHARD, *others}
    monkeypatch.setattr(object_listings, "_MANY", 1)
    assert found(store_path, level=Level.objects) == expected
