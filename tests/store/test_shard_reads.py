"""Reads of store shards, whatever their storage, chunks and compression."""

import uuid
from collections.abc import Callable

import numpy as np
import pytest

from pipeline.core.errors import StoreInvalid
from pipeline.store.format import layout as layouts
from pipeline.store.format.layout import ArraySpec, StoreLayout
from pipeline.store.io.shards import encode_shard
from pipeline.store.io.storage import Storage
from pipeline.store.read import shard_reads
from pipeline.store.read.shard_reads import ShardReads

pytestmark = pytest.mark.heavy
ROWS, LENGTH, STREAMS, BLOCKS = 8, 6, 2, 2
NAME = "blocks.0.resid_post"
KEY = "blocks.0.resid_post/c.1.0.0"  # of the first block of stream 1


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path) -> Storage:
    return Storage.open(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def write(
    storage: Storage, chunk_bytes: int, compression: str, shard_bytes: int | None = None
) -> tuple[ShardReads, np.ndarray]:
    """Two streams of two blocks, with some chunks of zeros. Returns reads of them and the values of all rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "CHUNK_BYTES", chunk_bytes)
        array = ArraySpec(NAME, "bfloat16", 4)
        layout = StoreLayout(STREAMS, ROWS, LENGTH, (array,), compression, shard_bytes=shard_bytes)
        spec = layout.arrays[0]
        reads = ShardReads(storage, layout, "store")
        values = np.random.default_rng(0).integers(1, 9, (STREAMS * BLOCKS * ROWS, LENGTH, 4)).astype(spec.dtype)
        values[3 * ROWS :] = 0
        values[2:4] = 0
        for shard, block in enumerate(np.split(values, STREAMS * BLOCKS)):
            for part in range(layout.num_parts(spec)):
                content, _ = encode_shard(block[layout.part_place(spec, part)], layout.shard_format(spec))
                storage.put(layout.shard_key(spec, shard % STREAMS, shard // STREAMS, part), *content)
        return reads, values


def read(reads: ShardReads, first_row: int, num_rows: int) -> np.ndarray:
    out = reads.memory(NAME, num_rows)
    for started in reads.start(NAME, first_row, out):
        started.result()
    return out


@pytest.mark.parametrize(
    ("chunk_bytes", "piece_bytes", "shard_bytes", "compression"),
    [
        (8, 1, None, "none"),  # chunks, and pieces, of one slot
        (16, 200, 16, "zstd"),  # a shard of one chunk is a third of a row
        (16, 1 << 20, 2 * LENGTH * 8, "none"),  # a shard is two rows
        (LENGTH * 8, 200, None, "zstd"),
        (4 * LENGTH * 8, 1, 2 * LENGTH * 8, "none"),
        (1 << 20, 1 << 20, None, "none"),  # everything is one block
    ],
)
def test_all_reads_give_the_written_values(storage, monkeypatch, chunk_bytes, piece_bytes, shard_bytes, compression):
    monkeypatch.setattr(shard_reads, "PIECE_BYTES", piece_bytes)
    reads, values = write(storage, chunk_bytes, compression, shard_bytes)
    for first, last in ((0, len(values)), (0, ROWS), (5, 6), (3, 2 * ROWS + 1), (ROWS, 2 * ROWS), (7, 7)):
        for _ in range(2):  # the second time with a known index
            np.testing.assert_array_equal(read(reads, first, last - first), values[first:last])
    stacked = np.zeros((ROWS, LENGTH, 3, 4), values.dtype)
    for k in (2, 0):
        [*map(lambda started: started.result(), reads.start(NAME, ROWS, stacked[:, :, k]))]
    np.testing.assert_array_equal(stacked[:, :, 2], values[ROWS : 2 * ROWS])
    assert not stacked[:, :, 1].any()
    slots = np.random.default_rng(1).integers(0, len(values) * LENGTH, 50)
    out = np.empty((50, 4), values.dtype)
    for started in reads.start_slots(NAME, slots, out):
        started.result()
    np.testing.assert_array_equal(out, values.reshape(-1, 4)[slots])


def edited(edit: Callable[[bytearray], object]) -> Callable[[Storage], None]:
    def damage(storage: Storage) -> None:
        content = bytearray(storage.read(KEY))
        edit(content)
        storage.write(KEY, bytes(content))

    return damage


def cut(content: bytearray) -> None:
    del content[:9]


DAMAGES = {
    "missing": lambda storage: storage.write(KEY, None),
    "empty": lambda storage: storage.write(KEY, b""),
    "an edited value": edited(lambda content: content.__setitem__(5, content[5] ^ 1)),
    "an edited checksum of a chunk": edited(lambda content: content.__setitem__(LENGTH * 8, content[LENGTH * 8] ^ 1)),
    "an edited index": edited(lambda content: content.__setitem__(-9, content[-9] ^ 1)),
    "an edited checksum of the index": edited(lambda content: content.__setitem__(-1, content[-1] ^ 1)),
    "a cut beginning": edited(cut),
    "the index alone": edited(lambda content: content.__delitem__(slice(0, len(content) - 16 * ROWS - 4))),
    "an index beyond the end": edited(lambda content: content.__delitem__(slice(40, 60))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_of_every_read(storage, damage):
    """Of the store's other shards it is none."""
    reads, values = write(storage, LENGTH * 8, "none")
    DAMAGES[damage](storage)
    for num_rows in (1, ROWS, 1, ROWS):
        with pytest.raises(StoreInvalid, match=r"blocks\.0\.resid_post.*pipeline\.verify"):
            read(reads, ROWS, num_rows)
    np.testing.assert_array_equal(read(reads, 0, ROWS), values[:ROWS])
    np.testing.assert_array_equal(read(reads, 2 * ROWS, 2 * ROWS), values[2 * ROWS :])
