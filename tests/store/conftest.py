from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.example_store import copy_store, in_memory


@pytest.fixture(scope="session", params=["local", "memory"])
def read_only(request, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a complete example store that many tests share, on local disk and in memory."""
    path = str(tmp_path_factory.mktemp("read-only")) if request.param == "local" else "memory://read-only"
    copy_store(path)
    return path


@pytest.fixture(params=["local", "memory"])
def store_path(request, tmp_path: Path) -> Iterator[str]:
    """A path for a new store, on local disk and in memory."""
    if request.param == "local":
        yield str(tmp_path / "store")
        return
    with in_memory() as path:
        yield path
