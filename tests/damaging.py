"""Random damage to bytes and to JSON values, for fuzzers of files."""

import json
import random
from typing import Any

DEEP = "deep"  # replaced by nested JSON that json.dumps could not write
SCALARS: list[Any] = [
    *(None, True, False, "", "x", "../x", "/etc/passwd", "\ud800", "a\0b", "\n", "é" * 300, "9" * 5000, "NaN"),
    *(0, 1, -1, 2, 3, 7, 127, 2**16, 2**31 - 1, 2**31, 2**32, -(2**31), 10**9, 10**12, 2**63, 2**64, 10**30, 10**4000),
    *(0.5, 1e-320, 1e20, 1e308, float("nan"), float("inf"), -float("inf"), -0.0),
    *([], {}, [[]], [0], [1, 2], ["x"], [None], {"a": 1}, {"": None}, [1e9] * 3, [0] * 1000, DEEP),
]


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """The content with flipped bits, truncated, or with a range removed, doubled, overwritten or filled with noise."""
    size = len(content)
    start = rng.randrange(size) if rng.random() < 0.5 else rng.randrange(min(size, 4000))  # often in the header
    stop = min(size, start + rng.choice([1, 2, 8, 100]))
    match rng.randrange(7):
        case 0:
            return content[:start] + bytes([content[start] ^ (1 << rng.randrange(8))]) + content[start + 1 :]
        case 1:
            return content[:start]
        case 2:
            return content[:start] + content[stop:]
        case 3:
            return content[:stop] + content[start:stop] + content[stop:]
        case 4:
            return content[:start] + rng.randbytes(stop - start) + content[stop:]
        case 5:
            return content[:start] + rng.choice([b"[", b"{", b'"', b"\xff", b"\0", b"," * 9, b"-"]) + content[start:]
        case _:
            return rng.choice([b"", b"{}", b"[]", b"null", b"1", b"\xef\xbb\xbf{}", b"[" * 10**5, b'{"a":' * 10**5])


def damaged_value(value: Any, rng: random.Random) -> Any:
    """The value with one of its parts, at any depth, replaced, removed, doubled or added."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return value | {
                    rng.choice(["x", "auto_map", "rope_scaling", "layer_types", "head_dim"]): rng.choice(SCALARS)
                }
            case 2:
                return {(rng.choice(["", "x", "\ud800", "é"]) if name == key else name): value[name] for name in value}
            case _:
                return value | {key: damaged_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        match rng.randrange(4):
            case 0:
                return value[:index] + value[index + 1 :]
            case 1:
                return value[:index] + [value[index]] * 2 + value[index + 1 :]
            case _:
                return [*value[:index], damaged_value(value[index], rng), *value[index + 1 :]]
    if type(value) is int and abs(value) < 2**1000 and rng.random() < 0.3:
        return rng.choice([value + 1, value - 1, -value, value * 2, value * 2**40, float(value), str(value)])
    return rng.choice(SCALARS)


def to_json(value: Any, rng: random.Random) -> bytes:
    depth = rng.choice([60, 100, 900, 990, 100_000])
    text = json.dumps(value).replace(f'"{DEEP}"', "[" * depth + "]" * depth)
    if rng.random() < 0.05 and text.startswith('{"'):
        text = "{" + text[1:-1] + ", " + text[1:-1] + "}"  # every key appears twice
    return text.encode()
