import itertools
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pipeline.store.format.arrays import open_or_create
from pipeline.store.format.layout import SIDE_ARRAYS, ArraySpec, StoreLayout
from pipeline.store.io.digests import chunk_checksum
from pipeline.store.io.shard_files import ShardFiles, read_chunks
from pipeline.store.io.storage import Storage

ROWS = 8


def block(layout: StoreLayout, spec: ArraySpec) -> np.ndarray:
    """Random values, with padding in the first and the last two rows. -0.0 is not padding."""
    dtype = ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype
    values = np.random.default_rng(0).integers(1, 100, layout.shard_shape(spec)).astype(dtype)
    values[[0, -2, -1]] = spec.fill
    values[3] = -0.0
    return values


@pytest.mark.parametrize("length", [64, 4096], ids=["chunks of whole rows", "chunks of parts of a row"])
def test_shard_files_have_the_bytes_that_tensorstore_writes(tmp_path: Path, length: int) -> None:
    arrays = tuple(ArraySpec(dtype, dtype, 320) for dtype in ("bfloat16", "float32", "int8"))
    layout = StoreLayout(1, ROWS, length, arrays)
    opened = open_or_create(Storage.open(tmp_path / "tensorstore"), layout)
    files = ShardFiles(tmp_path / "files", ThreadPoolExecutor(2))
    chunks = set()
    for spec in layout.all_arrays:
        values = block(layout, spec)
        opened[spec.name][ROWS : 2 * ROWS].write(values).result()
        key = layout.shard_key(spec, stream=0, block=1)
        files.write(key, values, layout.chunk_shape(spec), spec.fill).result()
        assert (tmp_path / "files" / key).read_bytes() == (tmp_path / "tensorstore" / key).read_bytes(), spec.name
        chunks.add(layout.chunk_shape(spec)[1] == length)
    assert chunks == ({True} if length == 64 else {True, False})


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A shard of eight rows in chunks of 2 x 6 x 5 values, and these values."""
    values = np.random.default_rng(0).integers(1, 100, (ROWS, 6, 5)).astype(np.int16)
    ShardFiles(tmp_path, ThreadPoolExecutor(1)).write("shard", values, (2, 6, 5), fill=0).result()
    return tmp_path / "shard", values


@pytest.mark.parametrize(("first_row", "num_rows"), [(0, 8), (2, 4), (6, 2)])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_chunks_are_read_into_memory_of_the_caller(shard, first_row: int, num_rows: int, is_stacked: bool) -> None:
    path, values = shard
    out = np.zeros((num_rows, 6, 3, 5), np.int16)[:, :, 1] if is_stacked else np.zeros((num_rows, 6, 5), np.int16)
    assert read_chunks(str(path), 4, first_row // 2, out, (2, 6, 5))
    np.testing.assert_array_equal(out, values[first_row : first_row + num_rows])


def test_parts_of_a_row_are_read(tmp_path: Path) -> None:
    values = np.arange(2 * 6 * 5, dtype=np.float32).reshape(2, 6, 5) + 1
    ShardFiles(tmp_path, ThreadPoolExecutor(1)).write("shard", values, (1, 3, 5), fill=0).result()
    for out in (np.zeros((1, 6, 5), np.float32), np.zeros((1, 6, 2, 5), np.float32)[:, :, 0]):
        assert read_chunks(str(tmp_path / "shard"), 4, 2, out, (1, 3, 5))
        np.testing.assert_array_equal(out, values[1:])


def absent(content: bytes) -> None:
    return None


def cut(content: bytes) -> bytes:
    return content[:-1]


def empty(content: bytes) -> bytes:
    return b""


def changed_at(position: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= 1
        return bytes(changed)

    return change


def with_index_beyond_the_end(content: bytes) -> bytes:
    index = np.full(8, 1 << 63, "<u8")
    index[1::2] = 2 * 6 * 5 * 2 + 4
    return content[:-68] + index.tobytes() + chunk_checksum(index.tobytes())


@pytest.mark.parametrize(
    "damage",
    [absent, cut, empty, changed_at(0), changed_at(120), changed_at(-1), changed_at(-68), with_index_beyond_the_end],
)
def test_damaged_and_missing_shards_are_left_to_tensorstore(shard, damage: Callable[[bytes], bytes | None]) -> None:
    path, _ = shard
    content = damage(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert not read_chunks(str(path), 4, 0, np.zeros((2, 6, 5), np.int16), (2, 6, 5))


def test_empty_chunks_and_other_chunk_shapes_are_left_to_tensorstore(tmp_path: Path) -> None:
    values = np.ones((4, 6, 5), np.int16)
    values[2:] = 0
    ShardFiles(tmp_path, ThreadPoolExecutor(1)).write("shard", values, (2, 6, 5), fill=0).result()
    path, out = str(tmp_path / "shard"), np.zeros((2, 6, 5), np.int16)
    assert read_chunks(path, 2, 0, out, (2, 6, 5))
    assert not read_chunks(path, 2, 1, out, (2, 6, 5))
    assert not read_chunks(path, 4, 0, out, (1, 6, 5))


def test_a_block_of_fill_values_makes_no_object_and_deletes_an_existing_one(tmp_path: Path) -> None:
    """As with TensorStore."""
    layout = StoreLayout(1, ROWS, 64, ())
    documents = SIDE_ARRAYS[-1]
    array = open_or_create(Storage.open(tmp_path), layout)[documents.name]
    files, key = ShardFiles(tmp_path, ThreadPoolExecutor(1)), layout.shard_key(documents, 0, 0)
    for fill in (5, documents.fill):
        values = np.full(layout.shard_shape(documents), fill, documents.dtype)
        files.write(key, values, layout.chunk_shape(documents), documents.fill).result()
        assert np.array_equal(array[:ROWS].read().result(), values)
    assert list((tmp_path / key).parent.iterdir()) == []


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("left_behind", [b"", b"x", b"left behind" * 100_000])
def test_a_block_of_fill_values_removes_a_killed_writers_lock_file(
    tmp_path: Path, left_behind: bytes, exists: bool
) -> None:
    files, key = ShardFiles(tmp_path, ThreadPoolExecutor(1)), "tokens/c/0/0"
    if exists:
        files.write(key, np.ones((4, 8), np.int32), (1, 8), 0).result()
    (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / f"{key}.__lock").write_bytes(left_behind)
    files.write(key, np.zeros((4, 8), np.int32), (1, 8), 0).result()
    assert list((tmp_path / key).parent.iterdir()) == []
    (tmp_path / f"{key}.__lock").write_bytes(left_behind)
    files.write(key, np.ones((4, 8), np.int32), (1, 8), 0).result()
    assert (tmp_path / key).stat().st_size == 4 * (32 + 4) + 4 * 16 + 4


def test_tensorstore_and_shard_files_lock_each_other_out(tmp_path: Path) -> None:
    storage, files = Storage.open(tmp_path), ShardFiles(tmp_path, ThreadPoolExecutor(4))
    values, longer = np.ones((4, 500_000), np.int32), b"x" * 9_000_000
    writes = []
    for _ in range(10):
        writes += [files.write("object", values, (1, 500_000), 0), storage.start_write("object", longer)]
    for write in writes:
        write.result()
    content = (tmp_path / "object").read_bytes()
    assert content == longer or (content[:4], len(content)) == (b"\1\0\0\0", 4 * 2_000_004 + 4 * 16 + 4)
    assert [path.name for path in tmp_path.iterdir()] == ["object"]


def test_many_writers_of_one_object_leave_it_whole(tmp_path: Path) -> None:
    """Even if a killed process has left a longer file behind."""
    (tmp_path / "object.__lock").write_bytes(b"left behind" * 100_000)
    writers = [ShardFiles(tmp_path, ThreadPoolExecutor(4)) for _ in range(3)]
    blocks = [np.full((4, 50_000), number, np.int32) for number in range(1, 25)]
    writes = [writer.write("object", each, (1, 50_000), 0) for writer, each in zip(itertools.cycle(writers), blocks)]
    for write in writes:
        write.result()
    content = (tmp_path / "object").read_bytes()
    assert len(content) == 4 * (200_000 + 4) + 4 * 16 + 4
    assert len(set(np.frombuffer(content[:200_000], np.int32).tolist())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["object"]


def test_an_object_stays_as_it_was_if_writing_fails(tmp_path: Path) -> None:
    files = ShardFiles(tmp_path, ThreadPoolExecutor(1))
    files.write("a/object", np.ones((2, 10), np.int32), (1, 10), 0).result()
    before = (tmp_path / "a" / "object").read_bytes()
    with largest_file(1000):
        write = files.write("a/object", np.ones((2, 10_000), np.int32), (1, 10_000), 0)
        with pytest.raises(OSError, match="File too large"):
            write.result()
    assert (tmp_path / "a" / "object").read_bytes() == before
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["object"]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Limits the size of this process's files, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
