"""zarr-python, TensorStore, xarray and dask read a store, as docs/reading.md says."""

import subprocess
import sys

import numpy as np
import pytest
import tensorstore as ts
import zarr

from pipeline.store import ActivationStore
from tests.store.example_store import (
    LENGTH,
    NUM_STREAMS,
    PART_BYTES,
    ROWS,
    WIDTHS,
    activation,
    blocks,
    copy_store,
    layout,
    write_store,
)

DTYPES = ("bfloat16", "float8_e4m3fn")
READ = """
import sys, zarr
for dtype in sys.argv[1:]:
    array = zarr.open_group(dtype, mode="r")["blocks.1.resid_post"]
    assert array.dtype.name == dtype, array.dtype
    print(dtype, *array[0, 1].astype("float32"))
"""


def test_zarr_alone_reads_every_dtype(tmp_path):
    for dtype in DTYPES:
        copy_store(str(tmp_path / dtype), dtype=dtype)
    result = subprocess.run([sys.executable, "-c", READ, *DTYPES], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for dtype, line in zip(DTYPES, result.stdout.splitlines(), strict=True):
        values = activation("blocks.1.resid_post", np.array(0), np.array(1), dtype).astype(np.float32)
        assert line == " ".join([dtype, *map(str, values)])


@pytest.mark.parametrize("shard_bytes", [None, PART_BYTES, 2 * LENGTH * 12])
def test_zarr_python_and_tensorstore_read_the_written_values_without_the_package(tmp_path, shard_bytes):
    path = str(tmp_path / "store")
    write_store(path, shard_bytes=shard_bytes)
    group = zarr.open_group(path, mode="r")
    ours = ActivationStore.open(path)
    written = [block for stream in range(NUM_STREAMS) for block in blocks(stream)]
    for spec in layout().all_arrays:
        other = group[spec.name]
        assert other.metadata.dimension_names == spec.dimension_names
        assert other.shards == layout(shard_bytes=shard_bytes).shard_shape(spec)
        storage = {"driver": "file", "path": f"{path}/{spec.name}/"}
        alone = ts.open({"driver": "zarr3", "kvstore": storage}).result()
        for array in (other[...], *(array[...].read().result() for array in (alone, ours.arrays[spec.name]))):
            assert array.dtype == written[0].arrays[spec.name].dtype
            for block in written:
                first, size = layout().first_row(block.record.stream, block.record.block), block.record.rows
                np.testing.assert_array_equal(array[first : first + size], block.arrays[spec.name][:size])
    assert group.attrs["activation_store"]["complete"] is True


@pytest.mark.filterwarnings("ignore:Object at _:zarr.errors.ZarrUserWarning")
def test_xarray_reads_a_store_block_by_block(tmp_path):
    xarray = pytest.importorskip("xarray")
    path = str(tmp_path)
    copy_store(path)
    store = ActivationStore.open(path)
    opened = xarray.open_zarr(path, consolidated=False, chunks={"row": ROWS}, drop_variables=["embed"])
    assert opened.attrs["activation_store"]["complete"]
    activations = opened["blocks.1.resid_post"]
    assert activations.dims == ("row", "position", "feature")
    assert activations.attrs["d"] == WIDTHS["blocks.1.resid_post"]
    assert activations.data.chunks[0][0] == ROWS
    rows = activations.isel(row=store.rows).load()
    assert rows.dtype == "bfloat16"
    np.testing.assert_array_equal(rows, store.read("blocks.1.resid_post", store.rows))
    valid = store.read_tokens(store.rows).segments > 0
    of_dask = activations.astype("float32").where(opened["segments"] > 0).mean(("row", "position")).compute()
    of_numpy = store.read("blocks.1.resid_post", store.rows, dtype=np.float32)[valid].mean(axis=0)
    np.testing.assert_allclose(of_dask, of_numpy, rtol=1e-6)
