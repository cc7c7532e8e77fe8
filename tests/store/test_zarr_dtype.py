"""zarr-python reads a store if the package is installed; it need not be imported."""

import subprocess
import sys

import numpy as np

from tests.store.example_store import activation, copy_store

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
