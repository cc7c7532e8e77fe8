"""Operators of the damage fuzzer: each changes an image of a store, at random."""

import io
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.store.format.arrays import layout_of
from pipeline.store.format.keys import Kind, parse_key
from pipeline.store.format.metadata import StoreRoot
from pipeline.store.io.shards import decode_shard, encode_shard
from tests.store.example_store import Image

_DEEP = b"[" * 200_000 + b"]" * 200_000  # too deep for a recursive parser
_FOREIGN = ("notes.txt", "_commits/notes.txt", "_summary/notes", "other/zarr.json", "_documents/x/y.parquet")


class Damage(NamedTuple):
    """is_visible: whether a reader must notice the damage. That is everything except an older root and valid store
    shards that are swapped, replayed or re-encoded: a reader that does not check their digests accepts these."""

    what: str
    is_visible: bool = True


Objects = dict[str, bytes]
Operator = Callable[[random.Random, Objects, Sequence[Image]], Damage | None]  # None: it found nothing to damage


def kind_of(key: str) -> Kind | None:
    """The kind of an object; None if it does not belong to a store."""
    parsed = parse_key(key)
    return parsed and parsed.kind


def pick(rng: random.Random, objects: Image, *kinds: Kind | None) -> str | None:
    """An object of one of these kinds (default: any). Picks the kind first, since most objects are store shards."""
    by_kind: dict[str, list[str]] = {}
    for key in objects:
        if not kinds or kind_of(key) in kinds:
            by_kind.setdefault(str(kind_of(key)), []).append(key)
    return rng.choice(by_kind[rng.choice(sorted(by_kind))]) if by_kind else None


def change_bytes(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    key = pick(rng, objects)
    content = bytearray(objects[key])
    if not content:
        return None
    how = rng.choice(("flip", "zeros", "garbage", "cut", "append", "empty"))
    at = rng.randrange(len(content))
    stop = min(len(content), at + rng.choice((1, 4, 64, 4096)))
    match how:
        case "flip":
            content[at] ^= 1 << rng.randrange(8)
        case "zeros" | "garbage":
            content[at:stop] = bytes(stop - at) if how == "zeros" else rng.randbytes(stop - at)
        case "cut":
            del content[rng.choice((at, -1, -8)) :]
        case "append":
            content += rng.choice((b"\n", b"\0", b"{}", rng.randbytes(rng.randrange(1, 65)), objects[key]))
        case "empty":
            content.clear()
    objects[key] = bytes(content)
    return Damage(f"{how} at byte {at} of {key}")


def delete(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage:
    """Deletes an object, or all in one of its folders."""
    key = pick(rng, objects)
    parts = key.split("/")
    prefix = "/".join(parts[: rng.randrange(1, len(parts))]) + "/" if len(parts) > 1 and rng.random() < 0.5 else key
    for doomed in [other for other in objects if other == prefix or (prefix != key and other.startswith(prefix))]:
        del objects[doomed]
    return Damage(f"{prefix} deleted")


def _swap(objects: Objects, left: str, right: str) -> None:
    contents = objects.pop(left, None), objects.pop(right, None)
    objects |= {key: content for key, content in zip((right, left), contents, strict=True) if content is not None}


def exchange(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Swaps two objects, or copies one over the other; usually of the same kind."""
    left = pick(rng, objects)
    right = pick(rng, objects, *([kind_of(left)] if rng.random() < 0.7 else []))
    if objects[left] == objects[right]:
        return None
    if is_copied := rng.random() < 0.5:
        objects[right] = objects[left]
    else:
        _swap(objects, left, right)
    is_visible = Kind.shard not in (kind_of(left), kind_of(right))
    return Damage(f"{left} {'copied over' if is_copied else 'exchanged with'} {right}", is_visible)


def exchange_blocks(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Swaps all store shards of two blocks, or everything of two arrays."""
    shards = [(key, parse_key(key)) for key in objects if kind_of(key) is Kind.shard]
    names = sorted({parsed.folder for _, parsed in shards if "." in parsed.folder})
    numbers = sorted({parsed.number for _, parsed in shards})
    if len(names) > 1 and (len(numbers) < 2 or rng.random() < 0.5):
        left, right = rng.sample(names, 2)
        for key in [key for key in objects if key.startswith(f"{left}/")]:
            _swap(objects, key, f"{right}/{key.removeprefix(f'{left}/')}")
    elif len(numbers) > 1:
        left, right = rng.sample(numbers, 2)
        for key, parsed in shards:
            if parsed.number == left:
                _swap(objects, key, key.replace(f"/c.{left}.", f"/c.{right}."))
    else:
        return None
    return Damage(f"{left} and {right} exchanged", is_visible=False)


def replay(rng: random.Random, objects: Objects, older: Sequence[Image]) -> Damage | None:
    before = rng.choice(older) if older else {}
    different = {key: content for key, content in before.items() if objects.get(key, content) != content}
    if (key := pick(rng, different)) is None:
        return None
    objects[key] = different[key]
    return Damage(f"{key} as it was at another time", kind_of(key) not in (Kind.shard, Kind.root))


def add_object(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Adds a copy of an object under an unused number, or a foreign object."""
    like = pick(rng, objects)
    numbered = re.sub(r"\d+(?!.*\d)", lambda m: str(int(m[0]) + rng.choice((1, 7, 99))).zfill(len(m[0])), like)
    key = rng.choice((numbered, rng.choice((*_FOREIGN, like + "~"))))
    if key in objects:
        return None
    objects[key] = objects[like]
    return Damage(f"{key} added, a copy of {like}", kind_of(key) is not Kind.shard)


def reencode_shard(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage:
    """Changes a store shard's values and their checksums: one number, all of them, or the order of rows."""
    key = pick(rng, objects, Kind.shard)
    layout = layout_of(StoreRoot.from_json(objects["zarr.json"], "the store"))
    format = layout.shard_format(next(spec for spec in layout.all_arrays if spec.name == parse_key(key).folder))
    values, _ = decode_shard(objects[key], format)
    bits = values.view(f"u{values.dtype.itemsize}")
    stored = np.argwhere(bits != 0)
    how = rng.choice(("one", "all", "rows"))
    if how == "rows" or not len(stored):
        values[:] = values[::-1].copy()
    elif how == "all":
        values[:] = np.where(bits != 0, -values, values)
    else:
        bits[tuple(stored[rng.randrange(len(stored))])] ^= rng.choice((1, 2))
    objects[key] = b"".join(encode_shard(values, format)[0])
    return Damage(f"{how} of the values of {key}", is_visible=False)


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """All values within JSON, as (container, key or index)."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    nodes = [(value, name) for name, _ in list(children)]
    return nodes + [node for container, name in nodes for node in _nodes(container[name])]


def _changed(rng: random.Random, value: Any) -> Any:
    """A different value, usually of the same type."""
    others = [None, True, 0, -1, 10**30, 1.5, float("nan"), "", "x", [], {}, [1], {"a": 1}, "DEEP"]
    same: list[Any] = []
    match value:
        case bool():
            same = [not value]
        case int():
            same = [value + 1, value - 1, -value, value * 2, 0, 2**31, 2**63]
        case float():
            same = [value + 1, value / 2, -value, float("inf")]
        case str():
            same = [value + "x", value[:-1], value.swapcase(), "../" + value, "default", "int32", "\ud800"]
        case list() if value:
            shuffled = rng.sample(value, len(value))
            same = [value[:-1], value[1:], value[::-1], value + value, [*value, value[-1]], shuffled]
        case dict() if value:
            same = [dict(rng.sample(list(value.items()), len(value) - 1))]
    return rng.choice(same if same and rng.random() < 0.7 else others)


def edit_json(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage:
    """Changes a value of any JSON object, or deletes or adds a key, without updating its checksums."""
    key = pick(rng, objects, Kind.root, Kind.array, Kind.record)
    document = json.loads(objects[key])
    container, name = rng.choice(_nodes(document))
    how = rng.choice(("change", "change", "change", "delete", "add")) if isinstance(container, dict) else "change"
    if how == "delete":
        del container[name]
    else:
        container[f"{name}_" if how == "add" else name] = _changed(rng, container[name])
    objects[key] = json.dumps(document, indent=1).encode().replace(b'"DEEP"', _DEEP) + b"\n"
    return Damage(f"{how} {name} of {key}")


def reencode_table(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Rewrites a parquet file with a different value, without a row, or with its rows in another order."""
    key = pick(rng, objects, Kind.documents, Kind.statistics, Kind.summary, Kind.group)
    if key is None or not (table := pq.read_table(pa.BufferReader(objects[key]))).num_rows:
        return None
    how = rng.choice(("value", "value", "value", "row", "order"))
    if how == "row":
        table = table[:-1]
    elif how == "order":
        table = table.take(list(range(table.num_rows))[::-1])
    else:
        name = rng.choice(table.column_names)
        rows, field, metadata = table[name].to_pylist(), table.schema.field(name), table.schema.metadata
        at = rng.randrange(len(rows))
        rows[at] = _other(rng, rows[at])
        table = table.set_column(table.column_names.index(name), field, pa.array(rows, field.type))
        table = table.replace_schema_metadata(metadata)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    objects[key] = sink.getvalue()
    return Damage(f"{how} of {key}")


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


_OF_ANY_BYTES = (change_bytes, delete, exchange, exchange_blocks, replay, add_object)  # also of damaged stores
OPERATORS: dict[str, Operator] = {
    operator.__name__: operator for operator in (*_OF_ANY_BYTES, reencode_shard, edit_json, reencode_table)
}


def damaged(rng: random.Random, sound: Image, older: Sequence[Image]) -> tuple[str, Damage, Image]:
    """The operator, what it did, and the damaged store. One time in eight, a second operator follows."""
    while True:
        name, image = rng.choice(sorted(OPERATORS)), dict(sound)
        damage = OPERATORS[name](rng, image, older)
        if damage is not None and image and image != sound:
            break
    if rng.random() < 1 / 8:
        second = rng.choice(_OF_ANY_BYTES)
        after = dict(image)
        more = second(rng, after, older)
        if more is not None and after and after != sound:
            return name, Damage(f"{damage.what}; {more.what}", damage.is_visible and more.is_visible), after
    return name, damage, image
