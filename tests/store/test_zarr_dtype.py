"""Installing the package is all that zarr-python needs to read a store: nothing of ours is imported here."""

import subprocess
import sys

from tests.store.example_store import write_store

READ = """
import sys, zarr
group = zarr.open_group(sys.argv[1], mode="r")
for name, array in group.arrays():
    if name.startswith("blocks."):
        assert array.dtype.name == "bfloat16", array.dtype
        assert float(abs(array[...].astype("float32")).max()) > 0
        print(name)
"""


def test_zarr_alone_reads_bfloat16(tmp_path):
    write_store(str(tmp_path / "store"))
    result = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "store")], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "blocks." in result.stdout
