"""Operators of the damage fuzzer that replace values by other valid numbers, JSON and tables.

Operators as in `damage_operators`.
"""

import io
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.store.format.arrays import layout_of
from pipeline.store.format.metadata import StoreRoot
from pipeline.store.io.shards import decode_shard, encode_shard
from tests.store.damage_operators import Damage, Objects, Operator, by_name, pick, shards_of
from tests.store.example_store import Image

DEEP = b"[" * 200_000 + b"]" * 200_000
_JSON = ("root", "array metadata", "record")
_PARQUET = ("table", "statistics", "summary", "group")


def reencode_shard(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Changes a store shard's values and their checksums: one number, all of them, or the order of rows."""
    name = rng.choice(sorted(shards_of(objects)))
    key = rng.choice(sorted(shards_of(objects)[name].values()))
    layout = layout_of(StoreRoot.from_json(objects["zarr.json"], "the store"))
    format = layout.shard_format(next(spec for spec in layout.all_arrays if spec.name == name))
    values, _ = decode_shard(objects[key], format)
    what = _edit(rng, values)
    written = b"".join(encode_shard(values, format)[0])
    if written == objects[key]:
        return None
    objects[key] = written
    return Damage(f"{what} of {key}", is_visible=False)


def _edit(rng: random.Random, values: np.ndarray) -> str:
    bits = values.view(f"u{values.dtype.itemsize}")
    held = np.argwhere(bits != 0)
    how = rng.choice(("one", "all", "rows"))
    if how == "rows" or not len(held):
        values[:] = values[::-1].copy()
        return "the rows' order"
    if how == "all":
        values[:] = np.where(bits != 0, -values, values)
        return "every sign"
    at = tuple(held[rng.randrange(len(held))])
    bits[at] ^= rng.choice((1, 2))
    return f"the value at {at}"


def _nodes(value: Any, parent: Any = None, key: Any = None) -> list[tuple[Any, Any]]:
    """All values within JSON, as (container, key or index)."""
    found = [] if parent is None else [(parent, key)]
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in list(children):
        found += _nodes(child, value, name)
    return found


def _changed(rng: random.Random, value: Any) -> Any:
    """A different value, usually of the same type."""
    others = [None, True, 0, -1, 10**30, 1.5, float("nan"), "", "x", [], {}, [1], {"a": 1}]
    if rng.random() < 0.3:
        return rng.choice(others)
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((value + 1, value - 1, -value, value * 2, 0, 2**31, 2**63))
        case float():
            return rng.choice((value + 1, value / 2, -value, float("inf")))
        case str():
            return rng.choice((value + "x", value[:-1], value.swapcase(), "../" + value, "default", "int32", "\ud800"))
        case list() if value:
            shuffled = rng.sample(value, len(value))
            return rng.choice((value[:-1], value[1:], value[::-1], value + value, [*value, value[-1]], shuffled, []))
        case dict() if value:
            return dict(rng.sample(list(value.items()), len(value) - 1))
    return rng.choice(others)


def _edit_json(rng: random.Random, content: bytes, edit: Callable[[Any], str | None]) -> tuple[bytes, str] | None:
    document = json.loads(content)
    what = edit(document)
    return None if what is None else (json.dumps(document, indent=1).encode() + b"\n", what)


def edit_json(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Changes a value of any JSON object, or deletes or adds a key, without updating its checksums."""

    def edit(document: Any) -> str | None:
        nodes = _nodes(document)
        container, key = rng.choice(nodes)
        before = container[key]
        if isinstance(container, dict) and (how := rng.random()) < 0.2:
            if how < 0.1:
                del container[key]
                return f"{key} deleted"
            container[f"{key}_"] = before
            return f"{key}_ added"
        container[key] = _changed(rng, before)
        return f"{key}: {json.dumps(before)[:60]} -> {json.dumps(container[key])[:60]}"

    key = pick(rng, objects, *_JSON)
    if key is None or (edited := _edit_json(rng, objects[key], edit)) is None:
        return None
    objects[key] = edited[0]
    return Damage(f"{key}: {edited[1]}")


def edit_root(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Changes a top-level attribute of the root: `arrays`, `complete`, `blocks`, ..."""

    def edit(document: Any) -> str | None:
        attributes = document["attributes"]["activation_store"]
        key = rng.choice([name for name in attributes if name not in ("software", "created")])
        before = attributes[key]
        attributes[key] = _changed(rng, before)
        return f"{key}: {json.dumps(before)[:60]} -> {json.dumps(attributes[key])[:60]}"

    edited = _edit_json(rng, objects["zarr.json"], edit)
    objects["zarr.json"] = edited[0]
    return Damage(f"zarr.json: {edited[1]}")


def edit_array(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Changes how Zarr reads an array: shape, chunks, codecs, fill value, separator, dtype, order of dimensions."""

    def edit(document: Any) -> str | None:
        grid = document["chunk_grid"]["configuration"]["chunk_shape"]
        codec = document["codecs"][0]["configuration"]
        chunks, codecs = codec.get("chunk_shape"), codec.get("codecs")
        axis = rng.randrange(len(grid))
        edits: dict[str, Callable[[], object]] = {
            "rows": lambda: document["shape"].__setitem__(0, document["shape"][0] + rng.choice((-1, 1, 4, -4))),
            "one row": lambda: document["shape"].__setitem__(0, 1),
            "a huge shape": lambda: document["shape"].__setitem__(axis, 2**40),
            "shape": lambda: document["shape"].__setitem__(axis, document["shape"][axis] * 2),
            "chunk_grid": lambda: grid.__setitem__(axis, max(1, grid[axis] // 2)),
            "fill_value": lambda: document.update(fill_value=rng.choice((1, -1, 7))),
            "separator": lambda: document.update(
                chunk_key_encoding={"name": "default", "configuration": {"separator": "/"}}
            ),
            "chunk_key_encoding": lambda: document.update(
                chunk_key_encoding={"name": "v2", "configuration": {"separator": "/"}}
            ),
            "data_type": lambda: document.update(
                data_type=rng.choice(("int32", "uint32", "int64", "float32", "int8", "bfloat16", "float16"))
            ),
            "dimension_names": lambda: document["dimension_names"].reverse(),
            "no dimension_names": lambda: document.pop("dimension_names"),
            "attributes": lambda: document.update(attributes={"layer": 2, "site": "mlp_out"}),
        }
        if codecs is not None:
            edits |= {
                "inner chunk_shape": lambda: chunks.__setitem__(axis, max(1, chunks[axis] // 2)),
                "no checksum": lambda: codecs.pop(),
                "endian": lambda: codecs[0].update(configuration={"endian": "big"}),
                "a transpose": lambda: codecs.insert(
                    0, {"name": "transpose", "configuration": {"order": list(range(len(grid)))[::-1]}}
                ),
                "zstd": lambda: codecs.insert(1, {"name": "zstd", "configuration": {"level": 1}}),
                "index_location": lambda: codec.update(index_location="start"),
                "no shards": lambda: document.update(codecs=codecs),
            }
        name = rng.choice(sorted(edits))
        edits[name]()
        return name

    key = pick(rng, objects, "array metadata")
    if (edited := _edit_json(rng, objects[key], edit)) is None or edited[0] == objects[key]:
        return None
    objects[key] = edited[0]
    return Damage(f"{key}: {edited[1]}")


def nest_deeply(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Replaces an object, or a value in it, by JSON that is too deep for a recursive parser."""
    key = pick(rng, objects, *_JSON)
    if rng.random() < 0.5:
        objects[key] = DEEP
        return Damage(f"{key} is JSON of {len(DEEP) // 2} levels")

    def edit(document: Any) -> str:
        container, name = rng.choice(_nodes(document))
        container[name] = "DEEP"
        return f"{name} is JSON of {len(DEEP) // 2} levels"

    content, what = _edit_json(rng, objects[key], edit)
    objects[key] = content.replace(b'"DEEP"', DEEP)
    return Damage(f"{key}: {what}")


def reencode_table(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Rewrites a Parquet file with a different value, without a row, or with its rows in another order."""
    key = pick(rng, objects, *_PARQUET)
    if key is None:
        return None
    table = pq.read_table(pa.BufferReader(objects[key]))
    if not table.num_rows:
        return None
    how = rng.choice(("value", "value", "value", "row", "order"))
    if how == "row":
        table, what = table[:-1], "the last row"
    elif how == "order":
        table, what = table.take(list(range(table.num_rows))[::-1]), "the rows' order"
    else:
        name = rng.choice(table.column_names)
        rows = table[name].to_pylist()
        at = rng.randrange(len(rows))
        before = rows[at]
        rows[at] = _other(rng, before)
        if rows[at] == before:
            return None
        field = table.schema.field(name)
        metadata = table.schema.metadata
        table = table.set_column(table.column_names.index(name), field, pa.array(rows, field.type))
        table = table.replace_schema_metadata(metadata)
        what = f"{name} of row {at}"
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    if sink.getvalue() == objects[key]:
        return None
    objects[key] = sink.getvalue()
    return Damage(f"{what} of {key}")


def _other(rng: random.Random, value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return max(0, value + rng.choice((-1, 1)))
        case float():
            return value + 1.0
        case str():
            return value + "x"
        case list() if value:
            at = rng.randrange(len(value))
            return [*value[:at], _other(rng, value[at]), *value[at + 1 :]]
    return value


OPERATORS: dict[str, Operator] = by_name(reencode_shard, edit_json, edit_root, edit_array, nest_deeply, reencode_table)
