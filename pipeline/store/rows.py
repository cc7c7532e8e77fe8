"""Reading rows of an array into memory that is already there."""

from collections.abc import Mapping

import numpy as np
import tensorstore as ts
from jaxtyping import Int32, Int64, Shaped

from pipeline.errors import StoreInvalid
from pipeline.selected import at_selected
from pipeline.store.commits import CommitRecord
from pipeline.store.kvstore import list_keys, object_url, store_errors
from pipeline.store.layout import SELECTED, SIDE_ARRAYS

# How many pieces to have under way. Enough to keep an object store busy; with more, TensorStore's own buffers no longer
# come from what was freed just before (measured: 30 pieces take 20 to 40 times the page faults of 6).
READS_AHEAD = 6


def read_runs(array: ts.TensorStore, rows: Int64[np.ndarray, " n"]) -> np.ndarray:
    """The given rows, in the given order: [n, ...]. One read per run of consecutive rows, all under way at once.

    Raises StoreError for a damaged or unreadable chunk.
    """
    out = np.empty((len(rows), *array.shape[1:]), array.dtype.numpy_dtype)
    if not len(rows):
        return out
    starts = np.flatnonzero(np.diff(rows, prepend=np.iinfo(np.int64).min) != 1)
    stops = np.append(starts[1:], len(rows))
    runs = zip(starts.tolist(), stops.tolist(), strict=True)
    for read in [start_read(array, int(rows[start]), out[start:stop]) for start, stop in runs]:
        wait_read(array, read)
    return out


def start_read(array: ts.TensorStore, first_row: int, out: np.ndarray) -> ts.WriteFutures:
    """Starts reading `len(out)` consecutive rows into `out`, which is complete when the result is waited for."""
    rows = array[first_row : first_row + len(out)]
    return ts.array(out).write(rows[ts.d[0].translate_to[0]])


def wait_read(array: ts.TensorStore, read: ts.WriteFutures) -> None:
    """Waits for a read of `array`. Raises StoreError."""
    with store_errors(object_url(array.kvstore, "")):
        read.result()


def require_stored(
    array: ts.TensorStore, rows: Int64[np.ndarray, " n"], values: Shaped[np.ndarray, "n values"]
) -> None:
    """Raises StoreInvalid when an object that holds some of `rows` is missing.

    Zarr reads a missing object as fill values. `values` are some of each row that are hardly ever all of them fill
    values, as those of a token; only where they are, the object is looked for.
    """
    suspicious = rows[(values == array.fill_value).all(axis=1)]
    for shard in np.unique(suspicious // array.chunk_layout.write_chunk.shape[0]).tolist():
        key = "/".join(["c", str(shard), *["0"] * (array.ndim - 1)])
        if key not in list_keys(array.kvstore, key):
            raise StoreInvalid(
                f"{object_url(array.kvstore, key)} is missing, although the block is committed. "
                "Run pipeline.verify, which lists all damage and says how to repair it."
            )


def require_selected(array: ts.TensorStore, record: CommitRecord, selected: Int32[np.ndarray, "rows K"]) -> None:
    """Raises StoreInvalid unless `selected`, of a whole block, holds as many tokens as the block's record says."""
    if (found := np.count_nonzero(selected >= 0)) != record.activations:
        raise StoreInvalid(
            f"{object_url(array.kvstore, '')} has {found} tokens of block {record.block} of stream {record.stream}, "
            f"whose record says {record.activations}. "
            "Run pipeline.verify, which lists all damage and says how to repair it."
        )


def beside_activations(sides: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Side arrays as they stand beside the slots for activations: themselves, [R, T], or at `selected`, [R, K]."""
    sides = dict(sides)
    selected = sides.pop(SELECTED.name, None)
    if selected is None:
        return sides
    fills = {spec.name: spec.fill for spec in SIDE_ARRAYS}
    return {name: at_selected(values, selected, fills.get(name, 0)) for name, values in sides.items()}
