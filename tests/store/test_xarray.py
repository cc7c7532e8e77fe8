"""xarray and dask read a store as docs/reading.md says, using only the package's Zarr dtype."""

import numpy as np
import pytest

from pipeline.store import ActivationStore
from tests.store.example_store import ROWS, WIDTHS, copy_store

xarray = pytest.importorskip("xarray")
pytestmark = pytest.mark.filterwarnings("ignore:Object at _:zarr.errors.ZarrUserWarning")


def test_xarray_reads_a_store_block_by_block(tmp_path):
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
