"""What the damage fuzzer does to a store: each operator changes an image of it, at random.

An operator picks its objects itself. `is_visible` says whether a reader has to notice what it did: everything but
valid store shards that are exchanged, replayed or encoded again, and an older root, which a reader that reads no
digests of them takes for good.
"""

import io
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.store.arrays import open_existing
from pipeline.store.kvstore import open_kvstore
from tests.store.damage_stores import Image, in_memory

DEEP = b"[" * 200_000 + b"]" * 200_000
_KINDS = (
    ("root", r"zarr\.json"),
    ("merged metadata", r"stats/(.*/)?zarr\.json"),
    ("merged values", r"stats/.*/c/.*"),
    ("array metadata", r"[^/]+/zarr\.json"),
    ("shard", r"[^/]+/c/.*"),
    ("consolidated", r"_commits/consolidated\.jsonl"),
    ("record", r"_commits/stream-.*"),
    ("table", r"_documents/.*"),
    ("statistics", r"_stats/.*"),
    ("group", r"_generated/.*\.parquet"),
    ("kept", r"_generated/.*\.activations"),
    ("metrics", r"_metrics/.*"),
)
_JSON = ("root", "array metadata", "merged metadata", "record", "consolidated")
_PARQUET = ("table", "statistics", "group")


class Damage(NamedTuple):
    what: str
    is_visible: bool = True


Objects = dict[str, bytes]
Operator = Callable[[random.Random, Objects, Sequence[Image]], Damage | None]


def kind_of(key: str) -> str:
    """What an object is; `other` where it is none of the store's."""
    return next((kind for kind, pattern in _KINDS if re.fullmatch(pattern, key)), "other")


def pick(rng: random.Random, objects: Image, *kinds: str) -> str | None:
    """An object of one of these kinds (of any): first the kind, since most objects are store shards."""
    by_kind: dict[str, list[str]] = {}
    for key in objects:
        if not kinds or kind_of(key) in kinds:
            by_kind.setdefault(kind_of(key), []).append(key)
    return rng.choice(by_kind[rng.choice(sorted(by_kind))]) if by_kind else None


# Bytes


def flip_bit(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    key = pick(rng, objects)
    content = bytearray(objects[key])
    if not content:
        return None
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    objects[key] = bytes(content)
    return Damage(f"bit {bit} of byte {at} of {key}")


def overwrite(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    key = pick(rng, objects)
    content = bytearray(objects[key])
    if not content:
        return None
    first = rng.randrange(len(content))
    stop = min(len(content), first + rng.choice((1, 4, 64, 4096)))
    content[first:stop] = rng.choice((bytes(stop - first), rng.randbytes(stop - first)))
    objects[key] = bytes(content)
    return Damage(f"bytes {first} to {stop - 1} of {key}")


def truncate(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    key = pick(rng, objects)
    if not objects[key]:
        return None
    size = len(objects[key]) - rng.choice((1, 8, rng.randrange(1, len(objects[key]) + 1)))
    objects[key] = objects[key][: max(0, size)]
    return Damage(f"{key} cut to {max(0, size)} bytes")


def append(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    key = pick(rng, objects)
    more = rng.choice((b"\n", b"\0", b"{}", rng.randbytes(rng.randrange(1, 65)), objects[key]))
    objects[key] += more
    return Damage(f"{len(more)} bytes appended to {key}")


def empty(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    key = pick(rng, objects)
    objects[key] = b""
    return Damage(f"{key} emptied")


# Whole objects


def delete(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    key = pick(rng, objects)
    del objects[key]
    return Damage(f"{key} deleted")


def delete_folder(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    parts = pick(rng, objects).split("/")[:-1]
    if not parts:
        return None
    prefix = "/".join(parts[: rng.randrange(1, len(parts) + 1)]) + "/"
    for key in [key for key in objects if key.startswith(prefix)]:
        del objects[key]
    return Damage(f"{prefix}* deleted")


def _is_visible(*keys: str) -> bool:
    return not any(kind_of(key) == "shard" for key in keys)


def _two(rng: random.Random, objects: Objects, same_kind: bool) -> tuple[str, str] | None:
    left = pick(rng, objects)
    right = pick(rng, objects, *([kind_of(left)] if same_kind else []))
    return None if objects[left] == objects[right] else (left, right)


def _swap(objects: Objects, left: str, right: str) -> None:
    contents = objects.pop(left, None), objects.pop(right, None)
    objects |= {key: content for key, content in zip((right, left), contents, strict=True) if content is not None}


def swap_same_kind(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    if (keys := _two(rng, objects, same_kind=True)) is None:
        return None
    _swap(objects, *keys)
    return Damage(f"{keys[0]} and {keys[1]} exchanged", _is_visible(*keys))


def swap_any(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    if (keys := _two(rng, objects, same_kind=False)) is None:
        return None
    _swap(objects, *keys)
    return Damage(f"{keys[0]} and {keys[1]} exchanged", _is_visible(*keys))


def copy_same_kind(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    if (keys := _two(rng, objects, same_kind=True)) is None:
        return None
    objects[keys[1]] = objects[keys[0]]
    return Damage(f"{keys[0]} copied over {keys[1]}", _is_visible(*keys))


def copy_any(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    if (keys := _two(rng, objects, same_kind=False)) is None:
        return None
    objects[keys[1]] = objects[keys[0]]
    return Damage(f"{keys[0]} copied over {keys[1]}", _is_visible(*keys))


def replay(rng: random.Random, objects: Objects, older: Sequence[Image]) -> Damage | None:
    if not older:
        return None
    before = rng.choice(older)
    different = {key: content for key, content in before.items() if objects.get(key, content) != content}
    if not different:
        return None
    key = pick(rng, different)
    objects[key] = different[key]
    return Damage(f"{key} as it was at another time", kind_of(key) not in ("shard", "root"))


def add_object(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """A copy of an object under a number that there is not, or something foreign."""
    like = pick(rng, objects)
    numbered = re.sub(r"\d+(?!.*\d)", lambda m: str(int(m[0]) + rng.choice((1, 7, 99))).zfill(len(m[0])), like)
    foreign = (
        "notes.txt",
        "_commits/notes.txt",
        "stats/notes",
        "other/zarr.json",
        "_documents/x/y.parquet",
        like + "~",
    )
    key = rng.choice((numbered, rng.choice(foreign)))
    if key in objects:
        return None
    objects[key] = objects[like]
    return Damage(f"{key} added, a copy of {like}", _is_visible(key))


# Store shards


def _shards(objects: Image) -> dict[str, dict[str, str]]:
    """Keys of the store shards by array and number."""
    found: dict[str, dict[str, str]] = {}
    for key in objects:
        if kind_of(key) == "shard":
            name, _, index = key.partition("/c/")
            found.setdefault(name, {})[index.partition("/")[0]] = key
    return found


def swap_blocks(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Store shards of two blocks: those of one array, of all activations, or of every array."""
    shards = _shards(objects)
    numbers = sorted({number for found in shards.values() for number in found})
    if len(numbers) < 2:
        return None
    left, right = rng.sample(numbers, 2)
    activations = [name for name in shards if "." in name or name in ("embed", "final_norm")]
    names = rng.choice(([rng.choice(sorted(shards))], activations, list(shards)))
    for name in names:
        places = [shards[name].get(number, f"{name}/c/{number}/0/0") for number in (left, right)]
        _swap(objects, *places)
    return Damage(f"blocks {left} and {right} of {', '.join(names)} exchanged", is_visible=False)


def swap_layers(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Store shards of two arrays of activations, of one block or all, or one over the other; or everything of both."""
    shards = _shards(objects)
    names = [name for name in shards if "." in name]
    if len(names) < 2:
        return None
    left, right = rng.sample(sorted(names), 2)
    if rng.random() < 0.2:
        for key in [key for key in objects if key.startswith(f"{left}/")]:
            _swap(objects, key, f"{right}/{key.removeprefix(f'{left}/')}")
        return Damage(f"the folders {left} and {right} exchanged", is_visible=False)
    numbers = sorted(set(shards[left]) & set(shards[right]))
    numbers = rng.choice((numbers, [rng.choice(numbers)]))
    is_copied = rng.random() < 0.3
    for number in numbers:
        if is_copied:
            objects[shards[right][number]] = objects[shards[left][number]]
        else:
            _swap(objects, shards[left][number], shards[right][number])
    what = "copied over" if is_copied else "exchanged with"
    return Damage(f"blocks {', '.join(numbers)} of {left} {what} {right}", is_visible=False)


def reencode_shard(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """A store shard with other values, and the checksums of these: one number, all of them, or the rows' order."""
    name = rng.choice(sorted(_shards(objects)))
    number, key = rng.choice(sorted(_shards(objects)[name].items()))
    with in_memory({part: objects[part] for part in (f"{name}/zarr.json", key)}) as path:
        kvstore = open_kvstore(path)
        array = open_existing(kvstore, [name])[name]
        size = array.chunk_layout.write_chunk.shape[0]
        first = int(number) * size
        rows = array[first : min(first + size, array.shape[0])]
        values = np.array(rows.read().result())
        what = _edit(rng, values)
        rows.write(values).result()
        written = kvstore.read(key).result()
    if written.state != "value" or written.value == objects[key]:
        return None
    objects[key] = written.value
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


# JSON


def _nodes(value: Any, parent: Any = None, key: Any = None) -> list[tuple[Any, Any]]:
    """Every value within JSON, as (container, key or index)."""
    found = [] if parent is None else [(parent, key)]
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in list(children):
        found += _nodes(child, value, name)
    return found


def _changed(rng: random.Random, value: Any) -> Any:
    """Another value: of the same type, more often than not."""
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
    """Of consolidated records, one line."""
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines)) if content.count(b"\n{") else None
    document = json.loads(content if at is None else lines[at])
    what = edit(document)
    if what is None:
        return None
    text = json.dumps(document, indent=1 if at is None else None).encode() + b"\n"
    return (text if at is None else b"".join([*lines[:at], text, *lines[at + 1 :]])), what


def edit_json(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """A value of any JSON object, or a key deleted or added; its own checksums are not made again."""

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
    """A value directly under the root's attributes: `arrays`, `complete`, `blocks` ..."""

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
    """What Zarr makes of the bytes: shape, chunks, codecs, fill value, separator, dtype, order of dimensions."""

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
                chunk_key_encoding={"name": "default", "configuration": {"separator": "."}}
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
    """JSON as deep as no parser that recurses reads it: a whole object, or one value in it."""
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


# Merged statistics


def _merged(objects: Image) -> list[str]:
    return sorted({key.split("/")[1] for key in objects if kind_of(key) == "merged values"})


def edit_merged(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """One number of the merged statistics."""
    key = pick(rng, objects, "merged values")
    if key is None or len(objects[key]) < 8:
        return None
    values = np.frombuffer(objects[key], "<f8").copy()
    at = rng.randrange(len(values))
    values[at] = rng.choice((values[at] + 1, -values[at], values[at] * (1 + 2**-50), np.nan))
    objects[key] = values.tobytes()
    return Damage(f"number {at} of {key}")


def exchange_merged(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Two arrays' merged statistics: their values, their attributes, or both; or one over the other."""
    names = _merged(objects)
    if len(names) < 2:
        return None
    left, right = rng.sample(names, 2)
    parts = rng.choice((["zarr.json"], ["c/0/0"], ["zarr.json", "c/0/0"]))
    is_copied = rng.random() < 0.3
    for part in parts:
        if is_copied:
            objects[f"stats/{right}/{part}"] = objects[f"stats/{left}/{part}"]
        else:
            _swap(objects, f"stats/{left}/{part}", f"stats/{right}/{part}")
    return Damage(f"stats/: {' and '.join(parts)} of {left} {'copied over' if is_copied else 'and'} {right}")


def delete_merged(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    names = _merged(objects)
    if not names:
        return None
    prefix = rng.choice(("stats/", f"stats/{rng.choice(names)}/"))
    for key in [key for key in objects if key.startswith(prefix)]:
        del objects[key]
    return Damage(f"{prefix}* deleted")


# Parquet


def reencode_table(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """A valid Parquet file with another value, without a row, or with its rows in another order."""
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


def _by_name(*operators: Operator) -> dict[str, Operator]:
    return {operator.__name__: operator for operator in operators}


# Those that work on any bytes, also on what is damaged already.
UNDISCERNING = _by_name(
    *(flip_bit, overwrite, truncate, append, empty, delete, delete_folder),
    *(swap_same_kind, swap_any, copy_same_kind, copy_any, replay, add_object),
    *(swap_blocks, exchange_merged, delete_merged),
)
OPERATORS = UNDISCERNING | _by_name(
    *(swap_layers, reencode_shard, edit_json, edit_root, edit_array, nest_deeply, edit_merged, reencode_table)
)
