import math

import numpy as np
import pytest

from pipeline.store.format.layout import MIB, PIECE_BYTES, ArraySpec, StoreLayout, rows_per_block_for


@pytest.mark.parametrize(
    ("rows", "length", "dtype", "width", "shard", "chunk"),
    [
        (32, 1024, "bfloat16", 896, (32, 1024, 896), (1, 256, 896)),  # 448 KiB of a 1.75 MiB row
        (32, 128, "bfloat16", 768, (32, 128, 768), (2, 128, 768)),  # 384 KiB, two rows
        (8, 2048, "float32", 4096, (8, 2048, 4096), (1, 32, 4096)),  # 512 KiB of a 32 MiB row
        (4, 8, "bfloat16", 6, (4, 8, 6), (4, 8, 6)),  # the whole shard
        (64, 1024, "int32", None, (64, 1024), (64, 1024)),  # 256 KiB
        (7, 1031, "float16", 1024, (7, 1031, 1024), (1, 1031, 1024)),  # no better divisor
    ],
)
def test_shards_and_chunks_have_the_specified_shapes(rows, length, dtype, width, shard, chunk):
    spec = ArraySpec("x", dtype, width)
    layout = StoreLayout(1, rows, length, (spec,))
    assert layout.shard_shape(spec) == shard
    assert layout.chunk_shape(spec) == chunk


@pytest.mark.parametrize(
    ("rows", "length", "width", "shard", "keys"),
    [
        (1, 131072, 4096, (1, 32768, 4096), ["x/c.17.0.0", "x/c.17.1.0", "x/c.17.2.0", "x/c.17.3.0"]),
        (2, 65536, 4096, (1, 32768, 4096), ["x/c.34.0.0", "x/c.34.1.0", "x/c.35.0.0", "x/c.35.1.0"]),
        (8, 8192, 4096, (4, 8192, 4096), ["x/c.34.0.0", "x/c.35.0.0"]),  # whole rows
        (4, 8192, 4096, (4, 8192, 4096), ["x/c.17.0.0"]),  # 256 MiB
        (1, 131071, 2048, (1, 131071, 2048), ["x/c.17.0.0"]),  # no better divisor
    ],
)
def test_large_blocks_are_divided_into_shards(rows, length, width, shard, keys):
    spec = ArraySpec("x", "bfloat16", width)
    layout = StoreLayout(3, rows, length, (spec,), shard_bytes=256 * MIB)
    assert layout.shard_shape(spec) == shard
    assert [layout.shard_key(spec, 2, 5, part) for part in range(layout.num_parts(spec))] == keys
    places = [layout.shard_place(spec, *map(int, key.split(".")[1:3])) for key in keys]
    assert set(places) == {(2, 5)}
    block = np.zeros((rows, length), np.int8)
    for part in range(len(keys)):
        block[layout.part_place(spec, part)] += part + 1
    assert (np.diff(block.ravel()) >= 0).all(), "parts in order are the block's slots in order"
    assert np.unique(block, return_counts=True)[1].tolist() == [rows * length // len(keys)] * len(keys)
    assert math.prod(shard[:2]) % math.prod(layout.chunk_shape(spec)[:2]) == 0


@pytest.mark.parametrize(
    ("shard_mib", "row_bytes", "step_rows", "max_steps", "expected"),
    [
        (64, MIB, 8, 1000, 64),
        (64, MIB, 24, 1000, 48),  # whole steps, at most shard_mib
        (100, MIB, 8, 1000, 64),  # a power of two of steps
        (64, MIB, 128, 1000, 128),  # at least one step
        (64, MIB, 8, 3, 16),  # a small job
        (0.25, 4096, 4, 1000, 64),
    ],
)
def test_rows_per_block_are_whole_steps_of_about_shard_mib(shard_mib, row_bytes, step_rows, max_steps, expected):
    assert rows_per_block_for(shard_mib, row_bytes, step_rows, max_steps) == expected


@pytest.mark.parametrize(
    ("rows", "length", "widths", "expected"),
    [
        (32, 1024, [896], 4),  # 7 MiB of 1.75 MiB rows
        (32, 128, [768, 64], 32),  # the whole shard
        (512, 128, [768], 42),  # 7.9 MiB, chunks of two rows
        (8, 8192, [4096], 1),  # a row of 64 MiB
    ],
)
def test_pieces_are_whole_rows_and_chunks_of_at_most_8_mib(rows, length, widths, expected):
    specs = tuple(ArraySpec(f"array {width}", "bfloat16", width) for width in widths)
    layout = StoreLayout(1, rows, length, specs)
    pieces = layout.piece_rows([spec.name for spec in specs])
    assert pieces == expected
    assert all(pieces % layout.chunk_shape(spec)[0] == 0 for spec in specs)
    assert pieces == 1 or pieces * length * max(widths) * 2 <= PIECE_BYTES
