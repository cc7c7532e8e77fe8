from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import zarr

from pipeline.store.format.arrays import zarr_metadata
from pipeline.store.format.layout import ArraySpec, StoreLayout
from pipeline.store.io.shards import (
    ShardFormat,
    checksum,
    decode_shard,
    encode_shard,
)
from pipeline.store.io.storage import Storage

ROWS = 8


def values_of(layout: StoreLayout, spec: ArraySpec) -> np.ndarray:
    """Random values, with padding in the first and the last two rows. -0.0 is not padding."""
    values = np.random.default_rng(0).integers(1, 100, layout.shard_shape(spec)).astype(layout.shard_format(spec).dtype)
    values[[0, -2, -1]] = spec.fill
    values[3] = -0.0
    return values


def layout_of_dtypes(length: int, compression: str) -> StoreLayout:
    arrays = tuple(
        ArraySpec(dtype, dtype, 320) for dtype in ("bfloat16", "float32", "float16", "int8", "float8_e4m3fn")
    )
    return StoreLayout(1, ROWS, length, arrays, compression)


def open_tensorstore(path: Path, layout: StoreLayout, spec: ArraySpec) -> ts.TensorStore:
    metadata = zarr_metadata(layout, spec, 4 * ROWS)
    kvstore = {"driver": "file", "path": f"{path}/{spec.name}/"}
    return ts.open({"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}, open=True, create=True).result()


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("length", [64, 1024], ids=["chunks of whole rows", "chunks of parts of a row"])
def test_shards_are_those_of_tensorstore(tmp_path: Path, length: int, compression: str) -> None:
    """The same bytes without compression; with it, each reads the other's."""
    layout = layout_of_dtypes(length, compression)
    uncompressed, chunks = layout_of_dtypes(length, "none"), set()
    for spec in layout.all_arrays:
        values, format = values_of(layout, spec), layout.shard_format(spec)
        array = open_tensorstore(tmp_path, layout, spec)
        array[ROWS : 2 * ROWS].write(values).result()
        theirs = (tmp_path / layout.shard_key(spec, stream=0, block=1)).read_bytes()
        parts, digest = encode_shard(values, format)
        assert Storage.open(tmp_path).put(layout.shard_key(spec, stream=0, block=2), *parts)
        assert array[2 * ROWS : 3 * ROWS].read().result().tobytes() == values.tobytes()
        for content in (theirs, b"".join(parts)):
            decoded, decoded_digest = decode_shard(content, format)
            assert (decoded.dtype, decoded.tobytes()) == (values.dtype, values.tobytes())
            assert decoded_digest == digest == encode_shard(values, uncompressed.shard_format(spec))[1]
        assert theirs == b"".join(parts) or compression == "zstd"
        chunks.add(layout.chunk_shape(spec)[1] == length)
    assert chunks == ({True} if length == 64 else {True, False})


def test_others_read_a_block_of_fill_values_from_its_index(tmp_path: Path) -> None:
    layout = layout_of_dtypes(64, "none")
    for spec in layout.all_arrays:
        array, format = open_tensorstore(tmp_path, layout, spec), layout.shard_format(spec)
        values = np.full(format.shape, spec.fill, format.dtype)
        parts, digest = encode_shard(values, format)
        content = b"".join(parts)
        assert len(content) == format.index_bytes == 16 * format.num_chunks + 4
        assert Storage.open(tmp_path).put(layout.shard_key(spec, 0, 0), *parts)
        for read in (array[:ROWS].read().result(), zarr.open_array(tmp_path / spec.name, mode="r")[:ROWS]):
            np.testing.assert_array_equal(read, values)
        assert decode_shard(content, format)[1] == digest


FORMATS = {
    compression: ShardFormat((ROWS, 6, 5), (2, 6, 5), np.dtype(np.int16), 0, compression)
    for compression in ("none", "zstd")
}


def shard(format: ShardFormat) -> bytes:
    """Four chunks; the third is absent."""
    values = np.arange(ROWS * 6 * 5, dtype=np.int16).reshape(format.shape) // 20 + 1
    values[4:6] = 0
    return b"".join(encode_shard(values, format)[0])


def with_index(change: Callable[[np.ndarray], None]) -> Callable[[bytes], bytes]:
    """A damage of the index with a checksum that matches it."""

    def changed(content: bytes) -> bytes:
        index = np.frombuffer(content[-68:-4], "<u8").reshape(-1, 2).copy()
        change(index)
        return content[:-68] + index.tobytes() + checksum(index.tobytes())

    return changed


def chunk_that_decompresses_to(num_bytes: int) -> bytes:
    """A shard whose first chunk has a wrong size, with matching checksums."""
    format = FORMATS["zstd"]
    other = ShardFormat((ROWS, num_bytes), (2, num_bytes), np.dtype(np.int8), 0, "zstd")
    parts, _ = encode_shard(np.ones(other.shape, np.int8), other)
    assert len(parts[0]) < format.chunk_bytes
    return b"".join(parts)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[:-1],
    "only an index": lambda content: content[-68:],
    "longer": lambda content: b"x" + content,
    "longer after the chunks": lambda content: content[:-68] + b"x" + content[-68:],
    "beyond the end": with_index(lambda index: index.__setitem__((1, 0), 1 << 63)),
    "overlapping": with_index(lambda index: index.__setitem__((1, 0), 0)),
    "huge size": with_index(lambda index: index.__setitem__((0, 1), 1 << 40)),
    "half absent": with_index(lambda index: index.__setitem__((2, 0), 0)),
    "absent instead of stored": with_index(lambda index: index.__setitem__(3, (1 << 64) - 1)),
    "stored instead of absent": with_index(lambda index: index.__setitem__(2, index[3])),
}


@pytest.mark.parametrize("compression", FORMATS)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found(damage: Callable[[bytes], bytes], compression: str) -> None:
    format = FORMATS[compression]
    content = shard(format)
    decode_shard(content, format)
    with pytest.raises(ValueError, match=r"^(its|a chunk) "):
        decode_shard(damage(content), format)


def changed_at(position: int, bits: int = 1) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= bits
        return bytes(changed)

    return change


@pytest.mark.parametrize("compression", FORMATS)
def test_every_changed_byte_is_found(compression: str) -> None:
    format = FORMATS[compression]
    content = shard(format)
    for position in range(len(content)):
        with pytest.raises(ValueError, match=r"^(its|a chunk) "):
            decode_shard(changed_at(position, 1 << position % 8)(content), format)


@pytest.mark.parametrize("num_bytes", [59, 61, 1 << 20])
def test_chunks_that_decompress_to_another_size_are_found(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="decompressed|impossible"):
        decode_shard(chunk_that_decompresses_to(num_bytes), FORMATS["zstd"])
