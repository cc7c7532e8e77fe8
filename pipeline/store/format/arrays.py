"""The Zarr arrays of a store, through TensorStore's zarr3 driver."""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorstore as ts

from pipeline.core.errors import StoreInvalid
from pipeline.core.sites import ActivationKey
from pipeline.store.format.int8 import scale_name
from pipeline.store.format.layout import (
    ITEM_BYTES,
    MAX_ROWS,
    SELECTED,
    SIDE_ARRAYS,
    TOKENS,
    ArraySpec,
    StoreLayout,
    scale_spec,
)
from pipeline.store.format.metadata import StoreRoot
from pipeline.store.io.digests import array_digest, repeated_chunk_digest
from pipeline.store.io.directories import make_directories
from pipeline.store.io.failures import DAMAGE_REMEDY, VERIFY_REMEDY
from pipeline.store.io.parsing import parse_store_json
from pipeline.store.io.storage import Storage

ARRAY_REMEDY = (
    "Run pipeline.verify, which lists all damage. A zarr.json that was deleted is written anew by the next run."
)

# No store shard has as many, 1 TiB of the smallest: a size that was edited is not to be asked of the memory.
MAX_SHARD_ELEMENTS = 1 << 40

_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C = {"name": "crc32c"}
# Local files are mapped rather than read into memory that is new each time (measured: 1.35 times the throughput).
_MAPPED = {"file_io_mode": {"mode": "memmap"}}
_COMPRESSION = {"none": [], "zstd": [{"name": "zstd", "configuration": {"level": 1}}]}


def zarr_metadata(layout: StoreLayout, spec: ArraySpec) -> dict[str, Any]:
    """The array's zarr.json without its shape: dtype, shards, chunks, checksums, names of dimensions."""
    chunk_codecs = [_LITTLE_ENDIAN, *_COMPRESSION[layout.compression], _CRC32C]
    sharding = {
        "chunk_shape": list(layout.chunk_shape(spec)),
        "codecs": chunk_codecs,
        "index_codecs": [_LITTLE_ENDIAN, _CRC32C],
        "index_location": "end",
    }
    shard_shape = list(layout.shard_shape(spec))
    return {
        "data_type": spec.dtype,
        "fill_value": spec.fill,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": list(spec.dimension_names),
        "attributes": dict(spec.attributes),
    }


def open_or_create(storage: Storage, layout: StoreLayout) -> dict[str, ts.TensorStore]:
    """Every array of the layout, by name; those that are absent are created with MAX_ROWS rows.

    Raises StoreError when an array exists with another dtype, shape, chunking, checksum or attribute, or with a
    zarr.json that is no array's.
    """
    wanted = {spec.name: zarr_metadata(layout, spec) for spec in layout.all_arrays}

    def check(key: str, content: bytes | None) -> dict[str, Any] | None:
        return None if content is None else _parse_zarr_json(content, storage.url(key))

    zarr_jsons = storage.read_checked([f"{name}/zarr.json" for name in wanted], check)
    absent = {name for name, zarr_json in zip(wanted, zarr_jsons, strict=True) if zarr_json is None}
    for spec in layout.all_arrays:
        if spec.name in absent:
            wanted[spec.name]["shape"] = [MAX_ROWS, *layout.shard_shape(spec)[1:]]
    if (root := storage.directory) is not None:
        for name in absent:
            with storage.errors(f"{name}/zarr.json"):
                make_directories(root + name, root)
    opened = _open(storage, wanted, create=absent)
    for name, what in array_mismatches(layout, opened).items():
        raise StoreInvalid(f"{storage.url(f'{name}/zarr.json')} {what}. {ARRAY_REMEDY}")
    return opened


def open_existing(
    storage: Storage, names: Iterable[str], digests: Mapping[str, str] = MappingProxyType({})
) -> dict[str, ts.TensorStore]:
    """The named arrays, for reading, whatever their dtype and shape. Raises StoreError; StoreInvalid for a zarr.json
    that is missing, is no array's, has more dimensions or elements than an array of a store, or another digest than
    the root's `digests` say."""
    names = list(names)
    for name, zarr_json in read_zarr_jsons(storage, names).items():
        if name in digests and array_digest(zarr_json) != digests[name]:
            subject = storage.url(f"{name}/zarr.json")
            raise StoreInvalid(f"{subject} does not have the digest that the root names. {DAMAGE_REMEDY}")
    return _open(storage, {name: {} for name in names}, is_read_only=True)


def _parse_zarr_json(content: bytes, subject: str) -> dict[str, Any]:
    """Raises StoreInvalid unless this may be the zarr.json of an array of a store. TensorStore checks the rest: it
    believes every size, and ends the process where attributes are nested deep."""
    zarr_json = parse_store_json(content, subject, ARRAY_REMEDY)
    try:
        shape, shard = zarr_json["shape"], zarr_json["chunk_grid"]["configuration"]["chunk_shape"]
        sizes = [*shape, *shard]
        is_sound = 2 <= len(shape) == len(shard) <= 3 and isinstance(zarr_json.get("attributes", {}), dict)
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreInvalid(f"{subject} is no array's ({type(error).__name__} {error}). {ARRAY_REMEDY}") from error
    is_sound = is_sound and all(type(size) is int and size >= 0 for size in sizes) and min(shard) > 0
    if not is_sound or shape[0] > MAX_ROWS or math.prod(shard) > MAX_SHARD_ELEMENTS:
        raise StoreInvalid(
            f"{subject} has the shape {shape} and store shards {shard}: expected 2 or 3 dimensions, at most {MAX_ROWS} "
            f"rows, and {MAX_SHARD_ELEMENTS} elements of a store shard. {ARRAY_REMEDY}"
        )
    return zarr_json


def stored_layout(root: StoreRoot, arrays: Mapping[str, ts.TensorStore]) -> StoreLayout:
    """The layout that the root and the sizes of the arrays describe; `array_mismatches` compares the arrays with it.

    Raises StoreInvalid where an array has another number of dimensions, or a dtype that no store has.
    """
    outputs = root.metadata.outputs
    sides = {spec.name: spec for spec in (*SIDE_ARRAYS, SELECTED, *outputs)}
    for name, array in arrays.items():
        num_dimensions = len(sides[name].dimension_names) if name in sides else 3
        dtype = array.dtype.name
        named = _named_dtype(root, name, dtype) if name in root.arrays else dtype
        if array.ndim != num_dimensions or not {dtype, named} <= ITEM_BYTES.keys():
            raise StoreInvalid(
                f"{name}/zarr.json has dtype {dtype} (the root names {named}) and {array.ndim} dimensions, expected "
                f"{num_dimensions}. "
                f"{VERIFY_REMEDY}"
            )
    selected = arrays[SELECTED.name].shape[1] if root.metadata.selects else None
    slots = TOKENS.slots if selected is None else SELECTED.slots
    activations = tuple(
        ArraySpec(name, _named_dtype(root, name, arrays[name].dtype.name), arrays[name].shape[2], slots=slots)
        for name in root.arrays
    )
    scaled = activations if root.metadata.has_scales else ()
    return StoreLayout(
        num_streams=root.metadata.num_streams,
        rows_per_block=root.metadata.rows_per_block,
        length=arrays[TOKENS.name].shape[1],
        arrays=activations,
        compression=root.metadata.store.get("compression", "none"),
        selected=selected,
        scales=tuple(scale_spec(spec, arrays[scale_name(spec.name)].shape[2]) for spec in scaled),
        outputs=outputs,
    )


def _named_dtype(root: StoreRoot, name: str, default: str) -> str:
    """The dtype that the root names for an array of activations; `default` where it names none."""
    return ActivationKey.parse(name).site.stored_dtype(root.metadata.capture.get("dtype", default))


def array_mismatches(layout: StoreLayout, arrays: Mapping[str, ts.TensorStore]) -> dict[str, str]:
    """By name, what is wrong with the arrays whose dtype, dimensions or store shards are not those of the layout."""
    mismatches = {}
    for spec in layout.all_arrays:
        array, shard_shape = arrays[spec.name], layout.shard_shape(spec)
        stored = (array.dtype.name, array.shape[1:], array.chunk_layout.write_chunk.shape)
        expected = (spec.dtype, shard_shape[1:], shard_shape)
        if stored != expected:
            mismatches[spec.name] = f"has dtype, shape and store shards {stored}, expected {expected}"
    return mismatches


def fill_digest(array: ts.TensorStore) -> str:
    """The digest of a block whose values are all the array's fill value. Zarr stores no object of such a block."""
    shard_shape, chunk_shape = array.chunk_layout.write_chunk.shape, array.chunk_layout.read_chunk.shape
    fill = np.asarray(array.fill_value, array.dtype.numpy_dtype)
    return repeated_chunk_digest(np.full(chunk_shape, fill), math.prod(shard_shape) // math.prod(chunk_shape))


def require_layout(root: StoreRoot, arrays: Mapping[str, ts.TensorStore], path: str) -> StoreLayout:
    """The layout of a store. Raises StoreInvalid unless its arrays have the dtypes and sizes that the root demands."""
    layout = stored_layout(root, arrays)
    for name, what in array_mismatches(layout, arrays).items():
        raise StoreInvalid(f"{path}/{name}/zarr.json {what}. {ARRAY_REMEDY}")
    if layout.length != root.metadata.batch.get("length", layout.length):
        raise StoreInvalid(
            f"{path}/tokens/zarr.json has rows of {layout.length} positions, and the root's batch.length is "
            f"{root.metadata.batch['length']}. {ARRAY_REMEDY}"
        )
    return layout


def set_rows(storage: Storage, names: Iterable[str], rows: int) -> None:
    """Gives the named arrays `rows` rows. Only their zarr.json change; no chunk is deleted. Raises StoreError.

    Written without a condition, unlike TensorStore's resize: processes that do this at the same time write the same.
    """
    for name, zarr_json in read_zarr_jsons(storage, names).items():
        if zarr_json["shape"][0] != rows:
            zarr_json["shape"][0] = rows
            text = json.dumps(zarr_json, separators=(",", ":"), ensure_ascii=False)
            storage.write(f"{name}/zarr.json", text.encode())


def read_zarr_jsons(storage: Storage, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The zarr.json of each named array. Raises StoreInvalid for one that is missing, is no array's, or has more
    dimensions or elements than an array of a store, and StoreError."""

    def check(key: str, content: bytes | None) -> dict[str, Any]:
        subject = storage.url(key)
        if content is None:
            raise StoreInvalid(f"{subject} is missing. {ARRAY_REMEDY}")
        return _parse_zarr_json(content, subject)

    names = list(names)
    zarr_jsons = storage.read_checked([f"{name}/zarr.json" for name in names], check)
    return dict(zip(names, zarr_jsons, strict=True))


def read_array_digests(storage: Storage, names: Iterable[str]) -> dict[str, str]:
    """The digest of each named array's metadata. Raises StoreInvalid and StoreError."""
    return {name: array_digest(zarr_json) for name, zarr_json in read_zarr_jsons(storage, names).items()}


def edited_arrays(storage: Storage, digests: Mapping[str, str]) -> list[str]:
    """Which of the arrays have other metadata than the root, whose `digests` these are, knows of them."""
    return [name for name, digest in read_array_digests(storage, digests).items() if digest != digests[name]]


def refused_arrays(storage: Storage, layout: StoreLayout) -> dict[str, str]:
    """By array, what is wrong with its metadata, as far as the layout and the array's name tell."""
    refused = {}
    for spec in layout.all_arrays:
        wanted = {**zarr_metadata(layout, spec), "attributes": {}}
        try:
            _open(storage, {spec.name: wanted})
        except StoreInvalid as error:
            refused[spec.name] = str(error)
    for spec in layout.arrays:
        attributes = read_zarr_jsons(storage, [spec.name])[spec.name].get("attributes", {})
        if attributes.get("d", spec.width) != spec.width:
            refused[spec.name] = f"has the attribute d={attributes['d']}, and {spec.width} features"
    return refused


def _open(
    storage: Storage,
    wanted: Mapping[str, dict[str, Any]],
    create: Collection[str] = (),
    is_read_only: bool = False,
) -> dict[str, ts.TensorStore]:
    # Within one cache pool, arrays that are open lend their metadata to those that are opened later.
    resources = {"cache_pool": {"total_bytes_limit": 0}} | (_MAPPED if is_read_only else {})
    own_pool = ts.Context(resources, parent=storage.context)

    # Nothing is cached but what reads that are under way share: the index of a store shard. A reader need not ask
    # before each such read whether it has changed, which takes a request's latency.
    def start(name: str) -> ts.Future:
        spec = {"driver": "zarr3", "kvstore": storage.folder_spec(name)}
        spec |= {"metadata": wanted[name]} if wanted[name] else {}
        return ts.open(spec, open=True, create=name in create, context=own_pool, recheck_cached_data=not is_read_only)

    opening = {name: start(name) for name in wanted}

    def opened(name: str) -> ts.TensorStore:
        future = opening.pop(name, None) or start(name)
        with storage.errors(f"{name}/zarr.json"):
            return future.result()

    return {name: storage.retry_read(lambda name=name: opened(name)) for name in wanted}
