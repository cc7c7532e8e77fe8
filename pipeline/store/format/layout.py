"""The position of every row, store shard and chunk of a store. Pure arithmetic on integers.

Shapes: R rows per block (`rows_per_block`), T positions per row (`length`), K slots per row for selected tokens
(`selected`), D features per activation (`width`).
One block of one array is one store shard, which is one object, or several if it is large (`shard_bytes`). The chunks
inside a shard are the unit of reading.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows the names of its types once it is imported
import numpy as np
from jaxtyping import Float32, Num

from pipeline.core.sites import ActivationKey
from pipeline.data.text.labels import LABELS, Label, Part, Role
from pipeline.store.io.shards import ShardFormat

MIB = 1 << 20

# Chunks are as close to this as the sizes allow, between 0.25 and 1 MiB: a compromise between the overhead per read
# request and the cost of reading a few rows.
CHUNK_BYTES = MIB // 2

# A read of this size is large enough for object storage, and small enough that malloc reuses heap memory for it. Larger
# allocations are mapped each time, and the page faults cost more than half of the throughput.
PIECE_BYTES = 8 * MIB

# A block that has more bytes of an array is divided into several store shards.
LARGEST_SHARD_BYTES = 256 * MIB

ITEM_BYTES = {
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
}

# The scaled dtypes, with a float32 scale per token, or per token and group of features, and the value that the greatest
# magnitude of a group becomes: activation = value * scale, in float32. The scales of array x are in array x.scale.
LARGEST = {"int8": 127, "float8_e4m3fn": 448}


@dataclass(frozen=True)
class ArraySpec:
    """One array of a store: [row, position], or [row, position, feature] where `width` is given.

    dtype: the name of a Zarr v3 data type.
    attributes: those in the array's zarr.json.
    slots: the name of the second dimension: `position`, or `selection` where only some positions are stored.
    features: the name of the third dimension.
    chunked_as: an array whose chunks hold the same tokens as this one's.
    """

    name: str
    dtype: str
    width: int | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    fill: int = 0
    slots: str = "position"
    features: str = "feature"
    chunked_as: "ArraySpec | None" = None

    @property
    def position_bytes(self) -> int:
        """Bytes of one token slot."""
        return ITEM_BYTES[self.dtype] * (self.width or 1)

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The shape of one token slot: () or (width,)."""
        return () if self.width is None else (self.width,)

    @property
    def dimension_names(self) -> tuple[str, ...]:
        return ("row", self.slots) if self.width is None else ("row", self.slots, self.features)


def _spec(name: str, dtype: str, description: str, **more: Any) -> ArraySpec:
    return ArraySpec(name, dtype, attributes={"description": description}, **more)


TOKENS = _spec("tokens", "int32", "token ids; 0 where segments is 0")
SEGMENTS = _spec("segments", "int32", "0: padding; k: the row's k-th document window")
POSITIONS = _spec("positions", "int32", "position fed to the model, from 0 per window")
DOCUMENTS = _spec("documents", "int64", "document number, -1: padding", fill=-1)
SIDE_ARRAYS = (TOKENS, SEGMENTS, POSITIONS, DOCUMENTS)
SIDE_BYTES = sum(spec.position_bytes for spec in SIDE_ARRAYS)  # per position
_SELECTED = "row positions of the tokens whose activations are stored; -1: none"
SELECTED = _spec("selected", "int32", _SELECTED, fill=-1, slots="selection")


LABELS_ARRAY = ArraySpec(
    "labels",
    "int16",
    len(Label),
    attributes={
        "description": "of tokens in conversations; 0 where segments is 0",
        "labels": list(LABELS),
        **{f"{kind.__name__.lower()}s": [value.name for value in kind] for kind in (Role, Part)},
    },
    features="label",
)


def activation_spec(key: ActivationKey, hook_name: str, width: int, dtype: str, slots: str) -> ArraySpec:
    """The array of an activation, in a store whose activations have `dtype`."""
    attributes = {"layer": key.layer, "site": str(key.site), "hook_name": hook_name, "d": width}
    return ArraySpec(key.name, key.site.stored_dtype(dtype), width, attributes, slots=slots)


_TOP = {"width": 1, "features": "rank"}  # `output_specs` sets the width to `capture.top_logprobs`
OUTPUTS: Mapping[str, tuple[ArraySpec, ...]] = {
    "loss": (_spec("loss", "float32", "cross entropy of the next token, nats; NaN: no next token in the window"),),
    "entropy": (_spec("entropy", "float32", "of the next token's distribution, nats"),),
    "top_logprobs": (
        _spec("top_logprobs", "float32", "of the likeliest next tokens, nats", **_TOP),
        _spec("top_ids", "int32", "the likeliest next tokens, in order", **_TOP),
    ),
}
"""The arrays of each of `capture.outputs`, by its name."""
OUTPUT_NAMES = tuple(spec.name for specs in OUTPUTS.values() for spec in specs)


def output_specs(outputs: Collection[str], num_top: int, slots: str) -> tuple[ArraySpec, ...]:
    """The arrays of `capture.outputs`. `slots`: the name of the activations' second dimension."""
    specs = (spec for name, specs in OUTPUTS.items() if name in outputs for spec in specs)
    return tuple(replace(spec, slots=slots, width=None if spec.width is None else num_top) for spec in specs)


FEATURE_PARTS = ("index", "value", "n_active")
ERROR_PARTS = ("squared_error", "cosine")  # of the reconstruction, if it is measured


def feature_parts(is_reconstructed: bool) -> tuple[str, ...]:
    """The last parts of the names of an SAE's arrays."""
    return (*FEATURE_PARTS, *(ERROR_PARTS if is_reconstructed else ()))


def feature_specs(
    name: str, top: int, dtype: str, slots: str, reconstructed: str | None = None
) -> tuple[ArraySpec, ...]:
    """The arrays of an SAE.

    name: the prefix of their names. top: features stored per token. slots: the name of the activations' second
    dimension. reconstructed: the array whose reconstruction is measured, if any.
    Chunks of `index` and `value` hold the same tokens.
    """
    by_rank = {"width": top, "slots": slots, "features": "feature_rank"}
    index = _spec(f"{name}.index", "int32", "features that fire, by falling value; -1: none", fill=-1, **by_rank)
    values = "the features' values; 0 where there is none"
    value = _spec(f"{name}.value", dtype, values, chunked_as=index, **by_rank)
    counts = "how many features fire, also of those that are not stored"
    n_active = _spec(f"{name}.n_active", "int32", counts, slots=slots)
    if reconstructed is None:
        return index, value, n_active
    descriptions = ("|x - reconstruction|^2", "of the angle between x and its reconstruction")
    errors = (
        ArraySpec(f"{name}.{part}", "float32", attributes={"description": what, "x": reconstructed}, slots=slots)
        for part, what in zip(ERROR_PARTS, descriptions, strict=True)
    )
    return index, value, n_active, *errors


def scale_spec(activation: ArraySpec, groups: int) -> ArraySpec:
    """The scales of a scaled array. Their chunks hold the same tokens, so that a piece of both is whole chunks."""
    what = f"of each group of features of {activation.name}: activation = value * scale"
    more = {"slots": activation.slots, "features": "group", "chunked_as": activation}
    return _spec(scale_name(activation.name), "float32", what, width=groups, **more)


def scale_name(array: str) -> str:
    return f"{array}.scale"


def dequantised(values: Num[np.ndarray, "*n D"], scales: Float32[np.ndarray, "*n G"]) -> Float32[np.ndarray, "*n D"]:
    """Activations from stored values and their scales."""
    grouped_shape = (*scales.shape, values.shape[-1] // scales.shape[-1])
    activations = values.reshape(grouped_shape).astype(np.float32)
    activations *= scales[..., None]
    return activations.reshape(values.shape)


@dataclass(frozen=True)
class StoreLayout:
    """The geometry of a store: row = (block * num_streams + stream) * rows_per_block + r.

    arrays: the activation arrays. Every store also has the four side arrays, which align them with the text.
    selected: slots per row; None where the activations of all tokens are stored.
    shard_bytes: about how many a store shard has at most. A larger block of an array is several shards, which are whole
        rows or part of one row, so that the shards in order are the block's values in order. None: a block is one.
    scales: of scaled arrays.
    outputs: the arrays of `capture.outputs` and of SAEs.
    has_labels: whether tokens have labels.
    """

    num_streams: int
    rows_per_block: int
    length: int
    arrays: tuple[ArraySpec, ...]
    compression: str = "none"
    selected: int | None = None
    shard_bytes: int | None = None
    scales: tuple[ArraySpec, ...] = ()
    outputs: tuple[ArraySpec, ...] = ()
    has_labels: bool = False

    @property
    def side_arrays(self) -> tuple[ArraySpec, ...]:
        selected = () if self.selected is None else (SELECTED,)
        return (*SIDE_ARRAYS, *selected, *((LABELS_ARRAY,) if self.has_labels else ()))

    @property
    def all_arrays(self) -> tuple[ArraySpec, ...]:
        return (*self.side_arrays, *self.arrays, *self.scales, *self.outputs)

    @property
    def summarised(self) -> tuple[str, ...]:
        """The names that may have statistics: activation arrays, stored or only reconstructed by an SAE, and SAEs'
        features."""
        features = (spec.name.removesuffix(".index") for spec in self.outputs if spec.name.endswith(".index"))
        reconstructed = (str(spec.attributes["x"]) for spec in self.outputs if "x" in spec.attributes)
        return tuple(dict.fromkeys((*(spec.name for spec in self.arrays), *reconstructed, *features)))

    @property
    def slots(self) -> int:
        """Slots for activations per row: T or K."""
        return self.length if self.selected is None else self.selected

    def row_bytes(self, spec: ArraySpec) -> int:
        return self._row_slots(spec) * spec.position_bytes

    def _row_slots(self, spec: ArraySpec) -> int:
        return self.length if spec.slots == "position" else self.selected

    def first_row(self, stream: int, block: int) -> int:
        return (block * self.num_streams + stream) * self.rows_per_block

    def block_shape(self, spec: ArraySpec) -> tuple[int, ...]:
        """[R, T] or [R, T, D], with K instead of T in arrays of selected tokens."""
        return (self.rows_per_block, self._row_slots(spec), *spec.token_shape)

    def shard_shape(self, spec: ArraySpec) -> tuple[int, ...]:
        """Divides the block's shape, as a chunk's divides the shard's: whole rows or part of one, with all features."""
        rows, positions, *features = self.block_shape(spec)
        if self.shard_bytes is not None:
            rows, positions = _part(rows, positions, (spec.chunked_as or spec).position_bytes, self.shard_bytes)
        return (rows, positions, *features)

    def chunk_shape(self, spec: ArraySpec) -> tuple[int, ...]:
        rows, positions, *features = self.shard_shape(spec)
        return (*_part(rows, positions, (spec.chunked_as or spec).position_bytes, CHUNK_BYTES), *features)

    def num_parts(self, spec: ArraySpec) -> int:
        """How many store shards a block of the array has."""
        return math.prod(self.block_shape(spec)) // math.prod(self.shard_shape(spec))

    def part_place(self, spec: ArraySpec, part: int) -> tuple[slice, slice]:
        """The rows and slots of a block that are in one of its store shards."""
        rows, positions = self.shard_shape(spec)[:2]
        row, column = divmod(part, self._row_slots(spec) // positions)
        return slice(row * rows, (row + 1) * rows), slice(column * positions, (column + 1) * positions)

    def piece_rows(self, names: Collection[str], more: Collection[str] = ()) -> int:
        """How many rows of the arrays `names` and `more` to read at a time: about PIECE_BYTES of the widest, and whole
        chunks of `names`."""
        row_bytes = max(self.row_bytes(spec) for spec in self.all_arrays if spec.name in (*names, *more))
        chunk_rows = math.lcm(*(self.chunk_shape(spec)[0] for spec in self.all_arrays if spec.name in names))
        return min(max(1, PIECE_BYTES // (row_bytes * chunk_rows)) * chunk_rows, self.rows_per_block)

    def shard_key(self, spec: ArraySpec, stream: int, block: int, part: int = 0) -> str:
        """The key, relative to the store, of a store shard (Zarr v3's default chunk key encoding, with "." as the
        separator, so that an array is one directory)."""
        columns = self._row_slots(spec) // self.shard_shape(spec)[1]
        index = divmod((block * self.num_streams + stream) * self.num_parts(spec) + part, columns)
        return f"{spec.name}/c." + ".".join(map(str, (*index, *(0 for _ in spec.token_shape))))

    def shard_place(self, spec: ArraySpec, row: int, column: int) -> tuple[int, int]:
        """The stream and block of a store shard, from its indices."""
        columns = self._row_slots(spec) // self.shard_shape(spec)[1]
        index = (row * columns + column) // self.num_parts(spec)
        return index % self.num_streams, index // self.num_streams

    def shard_format(self, spec: ArraySpec) -> ShardFormat:
        """How the array's store shards are encoded."""
        shape, chunk_shape = self.shard_shape(spec), self.chunk_shape(spec)
        return ShardFormat(shape, chunk_shape, np.dtype(spec.dtype), spec.fill, self.compression)


def is_plain_files(path: str, compression: str) -> bool:
    """Whether a store's shards are local files with uncompressed chunks, which are written from the job's buffers."""
    return "://" not in path and compression == "none"


def rows_per_block_for(shard_mib: float, row_bytes: int, step_rows: int, max_steps: int) -> int:
    """How many rows a block has, so that a store shard of the largest array has about `shard_mib` MiB.

    row_bytes: bytes of one row of the largest array. step_rows: one process's rows per step. The result is `step_rows`
    times a power of two, so that half or twice as many processes can resume the store. It is at least one step, and at
    most `max_steps` steps, so that a small job does not write blocks that are mostly padding.
    """
    steps = max(1, min(int(shard_mib * MIB) // (row_bytes * step_rows), max_steps))
    return step_rows * 2 ** (steps.bit_length() - 1)


@lru_cache(1024)
def _part(rows: int, length: int, position_bytes: int, num_bytes: int) -> tuple[int, int]:
    """The rows and positions of equal parts, of whole rows or of one row, whose size is closest to `num_bytes` on a
    logarithmic scale."""

    def distance(candidate: tuple[int, int]) -> float:
        return abs(math.log2(candidate[0] * candidate[1] * position_bytes / num_bytes))

    whole_rows = ((r, length) for r in _divisors(rows))
    row_parts = ((1, t) for t in _divisors(length))
    return min((*whole_rows, *row_parts), key=distance)


def _divisors(n: int) -> Iterator[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return iter(sorted({*small, *(n // d for d in small)}))
