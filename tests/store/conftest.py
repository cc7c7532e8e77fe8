from pathlib import Path

import pytest

from pipeline.store.io.kvstore import list_keys, open_kvstore, write_key


@pytest.fixture(params=["local", "memory"])
def store_path(request, tmp_path: Path):
    """Where a store can be made, on each kind of storage that needs no network."""
    if request.param == "local":
        yield str(tmp_path / "store")
        return
    path = f"memory://{request.node.name}"
    yield path
    kvstore = open_kvstore(path)
    for key in list_keys(kvstore, "_") + list_keys(kvstore, "a") + list_keys(kvstore, "z"):
        write_key(kvstore, key, None)
