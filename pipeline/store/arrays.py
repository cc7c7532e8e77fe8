"""The Zarr arrays of a store, through TensorStore's zarr3 driver."""

from collections.abc import Iterable
from typing import Any

import tensorstore as ts

from pipeline.errors import StoreError
from pipeline.store.kvstore import CONTEXT, read_keys, store_errors
from pipeline.store.layout import MAX_ROWS, ArraySpec, StoreLayout

_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C = {"name": "crc32c"}
_COMPRESSION = {"none": [], "zstd": [{"name": "zstd", "configuration": {"level": 1}}]}


def zarr_metadata(layout: StoreLayout, spec: ArraySpec) -> dict[str, Any]:
    """The array's zarr.json without its shape: dtype, shards, chunks, checksums, names of dimensions."""
    chunk_codecs = [_LITTLE_ENDIAN, *_COMPRESSION[layout.compression], _CRC32C]
    sharding = {
        "chunk_shape": list(layout.chunk_shape(spec)),
        "codecs": chunk_codecs,
        "index_codecs": [_LITTLE_ENDIAN, _CRC32C],
    }
    shard_shape = list(layout.shard_shape(spec))
    return {
        "data_type": spec.dtype,
        "fill_value": spec.fill,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard_shape}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": list(spec.dimension_names),
        "attributes": dict(spec.attributes),
    }


def open_or_create(kvstore: ts.KvStore, layout: StoreLayout) -> dict[str, ts.TensorStore]:
    """Every array of the layout, by name; those that are absent are created with MAX_ROWS rows.

    Raises StoreError when an array exists with another dtype, shape or chunking.
    """
    specs = layout.all_arrays
    present = read_keys(kvstore, [f"{spec.name}/zarr.json" for spec in specs])
    opening = []
    for spec, zarr_json in zip(specs, present, strict=True):
        metadata = zarr_metadata(layout, spec)
        if zarr_json is None:
            metadata["shape"] = [MAX_ROWS, *layout.shard_shape(spec)[1:]]
        opening.append(_open(kvstore, spec.name, metadata=metadata, create=zarr_json is None))
    return _wait(kvstore, specs, opening)


def open_existing(kvstore: ts.KvStore, names: Iterable[str]) -> dict[str, ts.TensorStore]:
    """The named arrays, whatever their dtype and shape. Raises StoreError."""
    specs = [ArraySpec(name, "") for name in names]
    return _wait(kvstore, specs, [_open(kvstore, spec.name) for spec in specs])


def resize(arrays: dict[str, ts.TensorStore], rows: int) -> dict[str, ts.TensorStore]:
    """The same arrays with `rows` rows. Only zarr.json changes; no chunk is deleted. Raises StoreError."""
    pending = {
        name: array.resize(exclusive_max=[rows, *array.shape[1:]], resize_metadata_only=True)
        for name, array in arrays.items()
    }
    resized = {}
    for name, future in pending.items():
        with store_errors(arrays[name].kvstore.url + "zarr.json"):
            resized[name] = future.result()
    return resized


def _open(
    kvstore: ts.KvStore, name: str, metadata: dict[str, Any] | None = None, create: bool = False
) -> ts.Future[ts.TensorStore]:
    spec = {"driver": "zarr3", "kvstore": (kvstore / name / "").spec().to_json()}
    if metadata is not None:
        spec["metadata"] = metadata
    return ts.open(spec, open=True, create=create, context=CONTEXT)


def _wait(kvstore: ts.KvStore, specs: Iterable[ArraySpec], opening: list[ts.Future]) -> dict[str, ts.TensorStore]:
    opened = {}
    for spec, future in zip(specs, opening, strict=True):
        with store_errors(f"{kvstore.url}{spec.name}/zarr.json"):
            opened[spec.name] = future.result()
    return opened


def check_shape(array: ts.TensorStore, name: str, expected: tuple[int, ...]) -> None:
    """Raises StoreError unless the array's shape after the rows is `expected`."""
    if array.shape[1:] != expected:
        raise StoreError(f"array {name} has shape {array.shape}, expected [row, {', '.join(map(str, expected))}].")
