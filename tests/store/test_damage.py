"""`verify_store` names every damaged object, if it can without reading blocks, and nothing in a sound store. The shares
of several ranks find what one verification finds."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pipeline.core.errors import PipelineError
from pipeline.store.check.problems import Scope
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.commits import CommitRecord, commit_key
from pipeline.store.format.statistics import statistics_key
from pipeline.store.format.tables import table_key
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    CAPTURE,
    NUM_STREAMS,
    PART_BYTES,
    VOCAB_SIZE,
    Image,
    blocks,
    commit_block,
    copy_store,
    edit_root,
    flip,
    full_image,
    in_memory,
    layout,
    metadata,
    write_blocks,
    write_store,
)

pytestmark = pytest.mark.heavy
RESID = "blocks.1.resid_post"


def found(path: str, **scope) -> set[tuple[str, str]]:
    """The problems that one verification finds, or its error."""
    try:
        return {(problem.where, problem.what) for problem in verify_store(path, scope=Scope(**scope))}
    except PipelineError as error:
        return {(type(error).__name__, str(error))}


@pytest.mark.parametrize(
    ("finish", "max_blocks", "compression", "shard_bytes"),
    [
        (True, None, "none", None),
        (False, None, "zstd", PART_BYTES),
        (True, 2, "zstd", None),
        (False, 2, "none", PART_BYTES),
        (True, 0, "none", None),
        (False, 0, "zstd", None),
    ],
)
def test_a_sound_store_has_no_problems(store_path, finish, max_blocks, compression, shard_bytes):
    write_store(store_path, finish=finish, max_blocks=max_blocks, compression=compression, shard_bytes=shard_bytes)
    assert found(store_path) == set()


def test_streams_may_end_early_and_a_block_may_have_no_rows(store_path):
    """All documents of stream 0 are skipped."""
    writer = StoreWriter.open(store_path, metadata(), layout())
    write_blocks(writer, 1)
    empty = next(blocks(0))
    arrays = {name: np.full_like(values, -1 if name == "documents" else 0) for name, values in empty.arrays.items()}
    end = {**empty.record.start, "shard": 1}
    none = dict.fromkeys(("rows", "tokens", "activations", "documents"), 0)
    record = replace(empty.record, **none, next=end, exhausted=True)
    commit_block(writer, replace(empty, arrays=arrays, table=empty.table[:0], record=record))
    writer.finish()
    assert found(store_path) == set()


def edit(key: str, at: int = -1) -> Callable[[Storage], None]:
    return lambda storage: flip(storage, key, at)


def delete(key: str) -> Callable[[Storage], None]:
    return lambda storage: storage.write(key, None)


def copy(source: str, target: str) -> Callable[[Storage], None]:
    return lambda storage: storage.write(target, storage.read(source))


def cut(key: str) -> Callable[[Storage], None]:
    return lambda storage: storage.write(key, storage.read(key)[:-8])


def edit_record(**changes) -> Callable[[Storage], None]:
    """Edits a record and updates its checksum."""

    def change(storage: Storage) -> None:
        key = commit_key(0, 1)
        storage.write(key, replace(CommitRecord.from_json(storage.read(key), key), **changes).to_json())

    return change


def edit_rows(name: str) -> Callable[[Storage], None]:
    def change(storage: Storage) -> None:
        zarr_json = json.loads(storage.read(f"{name}/zarr.json"))
        zarr_json["shape"][0] -= 1
        storage.write(f"{name}/zarr.json", json.dumps(zarr_json).encode())

    return change


[BLOCKS] = [key for key in full_image() if key.startswith("_summary/blocks")]
[STATISTICS] = [key for key in full_image() if key.startswith("_summary/statistics")]
[IDS] = [key for key in full_image() if key.startswith("_summary/ids")]
START = {"shard": 0, "document": 0, "token": 0, "ordinal": 0}

# The damage, the object that verify reports (perhaps among others), the first sample that does, and what it says.
DAMAGE = {
    "record": (edit(commit_key(1, 0)), commit_key(1, 0), 0, "is not JSON"),
    "edited record": (edit(commit_key(0, 1), 60), commit_key(0, 1), 0, ""),
    "deleted first record": (
        delete(commit_key(1, 0)),
        commit_key(1, 1),
        0,
        "no readable record of block 0",
    ),
    "deleted last record": (delete(commit_key(0, 3)), commit_key(0, 3), 0, "finished with 4 blocks"),
    "record elsewhere": (copy(commit_key(0, 1), commit_key(1, 1)), commit_key(1, 1), 0, "of stream 0"),
    "record of no stream": (copy(commit_key(1, 0), commit_key(7, 0)), commit_key(7, 0), 0, "no committed"),
    "shard of no array": (copy(BLOCKS, "_commits/c.1.0"), "_commits/c.1.0", 0, "no committed block"),
    "notes": (copy(BLOCKS, "_commits/stream-00000/a"), "_commits/stream-00000/a", 0, "no committed block"),
    "rows": (edit_record(rows=9), commit_key(0, 1), 0, "has 9 rows, but a block has at most 4"),
    "tokens": (edit_record(tokens=99), commit_key(0, 1), 0, "has 99 tokens"),
    "start": (edit_record(start=START), commit_key(0, 1), 0, "but the previous block ends at"),
    "next": (edit_record(next=START), commit_key(0, 2), 0, "but the previous block ends at"),
    "exhausted": (edit_record(exhausted=True), commit_key(0, 1), 0, "but the stream has block 2"),
    "recent": (edit_record(recent=((1,) * 8,)), commit_key(0, 1), 0, "repeats other counts"),
    "counts": (edit_record(rows=3), BLOCKS, 0, "does not agree with the commit records of stream 0"),
    "blocks": (edit(BLOCKS), BLOCKS, 0, "differs from the one in the root"),
    "deleted shard": (delete(f"{RESID}/c.1.0.0"), f"{RESID}/c.1.0.0", 0, "is missing"),
    "deleted side": (delete("tokens/c.1.0"), "tokens/c.1.0", 0, "is missing"),
    "deleted documents": (delete(table_key(1, 0)), table_key(1, 0), 0, "is missing"),
    "deleted statistics": (delete(statistics_key(1, 0)), statistics_key(1, 0), 0, "is missing"),
    "shard of no block": (copy(BLOCKS, f"{RESID}/c.77.0.0"), f"{RESID}/c.77.0.0", 0, "no committed block"),
    "no shard": (copy(BLOCKS, f"{RESID}/c.07.0.0"), f"{RESID}/c.07.0.0", 0, "no committed block"),
    "table of no block": (copy(BLOCKS, table_key(1, 9)), table_key(1, 9), 0, "no committed block"),
    "deleted array": (delete(f"{RESID}/zarr.json"), f"{RESID}/zarr.json", 0, "is missing"),
    "edited array": (edit("tokens/zarr.json", 20), "tokens/zarr.json", 0, ""),
    "rows of an array": (edit_rows("embed"), "embed/zarr.json", 0, "has 26 rows"),
    **{
        f"shard {spec.name} {at}": (
            edit(layout().shard_key(spec, 0, 1), at),
            layout().shard_key(spec, 0, 1),
            1,
            "does not match its checksum",
        )
        for spec, at in zip(layout().all_arrays, (0, 37, -1, -17, 5, -6, 1), strict=True)
    },
    "cut shard": (cut(f"{RESID}/c.1.0.0"), f"{RESID}/c.1.0.0", 1, ""),
    "exchanged shard": (copy(f"{RESID}/c.0.0.0", f"{RESID}/c.1.0.0"), f"{RESID}/c.1.0.0", 1, "digest"),
    "document table": (edit(table_key(1, 0)), table_key(1, 0), 1, "sha256"),
    "statistics": (edit(statistics_key(1, 0)), statistics_key(1, 0), 1, "sha256"),
    "number of documents": (edit_record(documents=1), table_key(0, 1), 1, ""),
    "merged statistics": (edit(STATISTICS), STATISTICS, 1, "sha256"),
    "ids": (edit(IDS), IDS, 1, "sha256"),
    "deleted ids": (delete(IDS), IDS, 1, ""),
    # Of a store with several shards per block:
    "part: deleted": (delete(f"{RESID}/c.5.1.0"), f"{RESID}/c.5.1.0", 0, "is missing"),
    "part: last deleted": (delete("tokens/c.7.0"), "tokens/c.7.0", 0, "is missing"),
    "part: too far right": (
        copy(f"{RESID}/c.4.0.0", f"{RESID}/c.4.2.0"),
        f"{RESID}/c.4.2.0",
        0,
        "no committed",
    ),
    "part: edited": (edit(f"{RESID}/c.6.1.0", 2), f"{RESID}/c.6.1.0", 1, "does not match its checksum"),
    "part: exchanged": (
        copy(f"{RESID}/c.4.0.0", f"{RESID}/c.4.1.0"),
        f"{RESID}/c.4.1.0",
        1,
        "digest of the block's values",
    ),
}


def image_for(damage: str) -> Image:
    return full_image("parts" if damage.startswith("part:") else "int8")


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_with_and_without_reading_blocks(name):
    damage, where, first, what = DAMAGE[name]
    with in_memory(image_for(name)) as path:
        damage(Storage.open(path))
        for sample in (0, 1):
            problems = found(path, sample=sample)
            texts = [text for place, text in problems if place == where]
            assert bool(texts) == (sample >= first), sample
            shares = [found(path, sample=sample, rank=rank, world=3) for rank in range(3)]  # more than streams
            assert set.union(*shares) == problems
        assert any(what in text for text in texts), texts


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda root: root.update(complete=True, summary=None), "the store is complete, but has no summary"),
        (lambda root: root.update(num_streams=4), "its fingerprint does not match its content"),
        (lambda root: root["summary"].update(blocks="0" * 64), "is missing"),
        (lambda root: root["arrays"]["embed"].update(width=5), "does not describe the array of the store's root"),
        (lambda root: root.update(version=3), "format version 3"),
    ],
)
def test_an_edited_root_is_reported(store_path, edit, message):
    copy_store(store_path)
    edit_root(store_path, edit)
    assert any(message in what for _, what in found(store_path))


OUTPUTS = {"outputs": ["loss", "entropy", "top_logprobs"], "top_logprobs": 2}
WRONG = [  # array, value, whether verify reports it
    ("loss", np.nan, False),
    ("loss", np.inf, False),
    ("loss", -0.1, True),
    ("entropy", -0.1, True),
    ("entropy", np.log(VOCAB_SIZE) + 1e-4, False),
    ("entropy", np.log(VOCAB_SIZE) + 0.1, True),
    ("top_logprobs", 0.1, True),
    ("top_logprobs", -90, False),
]


@pytest.mark.parametrize(("name", "value", "is_reported"), WRONG)
def test_outputs_out_of_range_are_reported(name, value, is_reported):
    made = metadata(capture=CAPTURE | OUTPUTS)
    with in_memory() as path:
        writer = StoreWriter.open(path, made, replace(layout(), outputs=made.outputs))
        block = next(blocks(0))
        for spec in made.outputs:
            block.arrays[spec.name] = np.zeros(writer.layout.shard_shape(spec), spec.dtype)
        block.arrays[name][1, 2] = value
        commit_block(writer, block)
        problems = verify_store(path)
    shard = f"{name}/c.0.0" if name in ("loss", "entropy") else f"{name}/c.0.0.0"
    assert [problem.where for problem in problems] == [shard] * is_reported
    assert all("values are not within" in problem.what for problem in problems)


def test_a_sample_is_reproducible_and_finds_all_missing_objects(store_path):
    copy_store(store_path)
    places = [(s, block.record.block) for s in range(NUM_STREAMS) for block in blocks(s)]
    samples = set()
    for seed in range(8):
        calls: list[tuple[int, int]] = []
        scope = Scope(sample=0.5, seed=seed)
        assert verify_store(store_path, lambda done, total, calls=calls: calls.append((done, total)), scope=scope) == []
        expected = [place for place in places if scope.reads_block(*place)]
        assert calls == [(k, len(expected)) for k in range(1, len(expected) + 1)]
        samples.add(tuple(expected))
    assert len(samples) > 1
    seeds = {Scope(sample=0.5, seed=seed).reads_block(1, 0): seed for seed in range(16)}
    flip(store_path, "embed/c.1.0.0")
    assert found(store_path, sample=0.5, seed=seeds[False]) == set()
    assert {where for where, _ in found(store_path, sample=0.5, seed=seeds[True])} == {"embed/c.1.0.0"}
    for key in ("embed/c.1.0.0", table_key(0, 1)):
        Storage.open(store_path).write(key, None)
    assert {where for where, _ in found(store_path, sample=1e-9)} == {"embed/c.1.0.0", table_key(0, 1)}
