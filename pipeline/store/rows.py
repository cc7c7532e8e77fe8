"""Reading rows of an array into memory that is already there."""

import numpy as np
import tensorstore as ts
from jaxtyping import Int64

from pipeline.errors import StoreInvalid
from pipeline.store.kvstore import list_keys, object_url, store_errors

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


def require_stored(array: ts.TensorStore, rows: Int64[np.ndarray, " n"], values: np.ndarray) -> None:
    """Raises StoreInvalid when an object that holds some of `rows` is missing.

    Zarr reads a missing object as fill values. A committed row starts with a token, so its values there are hardly ever
    all of them fill values; only then is the object looked for.
    """
    if array.ndim == 3:
        values = values[:, 0]
    suspicious = rows[(values == array.fill_value).all(axis=1)]
    for shard in np.unique(suspicious // array.chunk_layout.write_chunk.shape[0]).tolist():
        key = "/".join(["c", str(shard), *["0"] * (array.ndim - 1)])
        if key not in list_keys(array.kvstore, key):
            raise StoreInvalid(
                f"{object_url(array.kvstore, key)} is missing, although the block is committed. "
                "Run pipeline.verify, which lists all damage and says how to repair it."
            )
