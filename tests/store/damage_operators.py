"""Operators of the damage fuzzer that change whole objects: each changes an image of a store, at random.

An operator picks its objects itself. `is_visible`: whether a reader must notice the damage. That is everything except
an older root and valid store shards that are swapped, replayed or re-encoded: a reader that does not check their
digests accepts these.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.store.example_store import Image

_KINDS = (
    ("root", r"zarr\.json"),
    ("array metadata", r"[^/]+/zarr\.json"),
    ("shard", r"[^/]+/c\..*"),
    ("summary", r"_summary/.*"),
    ("feature index", r"_features/.*"),
    ("record", r"_commits/stream-.*"),
    ("table", r"_documents/.*"),
    ("statistics", r"_statistics/.*"),
    ("group", r"_generated/.*\.parquet"),
    ("kept", r"_generated/.*\.activations"),
    ("metrics", r"_metrics/.*"),
)


class Damage(NamedTuple):
    what: str
    is_visible: bool = True


Objects = dict[str, bytes]
Operator = Callable[[random.Random, Objects, Sequence[Image]], Damage | None]


def by_name(*operators: Operator) -> dict[str, Operator]:
    return {operator.__name__: operator for operator in operators}


def kind_of(key: str) -> str:
    """The kind of an object; `other` if it does not belong to the store."""
    return next((kind for kind, pattern in _KINDS if re.fullmatch(pattern, key)), "other")


def pick(rng: random.Random, objects: Image, *kinds: str) -> str | None:
    """An object of one of these kinds (default: any). Picks the kind first, since most objects are store shards."""
    by_kind: dict[str, list[str]] = {}
    for key in objects:
        if not kinds or kind_of(key) in kinds:
            by_kind.setdefault(kind_of(key), []).append(key)
    return rng.choice(by_kind[rng.choice(sorted(by_kind))]) if by_kind else None


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


def swap(objects: Objects, left: str, right: str) -> None:
    contents = objects.pop(left, None), objects.pop(right, None)
    objects |= {key: content for key, content in zip((right, left), contents, strict=True) if content is not None}


def swap_same_kind(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    if (keys := _two(rng, objects, same_kind=True)) is None:
        return None
    swap(objects, *keys)
    return Damage(f"{keys[0]} and {keys[1]} exchanged", _is_visible(*keys))


def swap_any(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    if (keys := _two(rng, objects, same_kind=False)) is None:
        return None
    swap(objects, *keys)
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
    """Adds a copy of an object under an unused number, or a foreign object."""
    like = pick(rng, objects)
    numbered = re.sub(r"\d+(?!.*\d)", lambda m: str(int(m[0]) + rng.choice((1, 7, 99))).zfill(len(m[0])), like)
    foreign = (
        "notes.txt",
        "_commits/notes.txt",
        "_summary/notes",
        "other/zarr.json",
        "_documents/x/y.parquet",
        like + "~",
    )
    key = rng.choice((numbered, rng.choice(foreign)))
    if key in objects:
        return None
    objects[key] = objects[like]
    return Damage(f"{key} added, a copy of {like}", _is_visible(key))


def shards_of(objects: Image) -> dict[str, dict[str, str]]:
    """Keys of the store shards, by array and number."""
    found: dict[str, dict[str, str]] = {}
    for key in objects:
        if kind_of(key) == "shard":
            name, _, index = key.partition("/c.")
            found.setdefault(name, {})[index.partition(".")[0]] = key
    return found


def swap_blocks(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Swaps store shards of two blocks: those of one array, of all activations, or of every array."""
    shards = shards_of(objects)
    numbers = sorted({number for found in shards.values() for number in found})
    if len(numbers) < 2:
        return None
    left, right = rng.sample(numbers, 2)
    activations = [name for name in shards if "." in name or name in ("embed", "final_norm")]
    names = rng.choice(([rng.choice(sorted(shards))], activations, list(shards)))
    for name in names:
        swap(objects, shards[name][left], shards[name][right])
    return Damage(f"blocks {left} and {right} of {', '.join(names)} exchanged", is_visible=False)


def swap_layers(rng: random.Random, objects: Objects, _older: Sequence[Image]) -> Damage | None:
    """Swaps or copies store shards of two activation arrays, of one block or all; or swaps everything of both."""
    shards = shards_of(objects)
    names = [name for name in shards if "." in name]
    if len(names) < 2:
        return None
    left, right = rng.sample(sorted(names), 2)
    if rng.random() < 0.2:
        for key in [key for key in objects if key.startswith(f"{left}/")]:
            swap(objects, key, f"{right}/{key.removeprefix(f'{left}/')}")
        return Damage(f"the folders {left} and {right} exchanged", is_visible=False)
    numbers = sorted(set(shards[left]) & set(shards[right]))
    if not numbers:
        return None
    numbers = rng.choice((numbers, [rng.choice(numbers)]))
    is_copied = rng.random() < 0.3
    for number in numbers:
        if is_copied:
            objects[shards[right][number]] = objects[shards[left][number]]
        else:
            swap(objects, shards[left][number], shards[right][number])
    what = "copied over" if is_copied else "exchanged with"
    return Damage(f"blocks {', '.join(numbers)} of {left} {what} {right}", is_visible=False)


OPERATORS: dict[str, Operator] = by_name(
    *(flip_bit, overwrite, truncate, append, empty, delete, delete_folder),
    *(swap_same_kind, swap_any, copy_same_kind, copy_any, replay, add_object),
    *(swap_blocks, swap_layers),
)
"""Operators for any bytes, also of damaged stores."""
