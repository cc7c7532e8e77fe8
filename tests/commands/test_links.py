"""No command follows a symbolic link within a store: it refuses the store, or does not need what is linked. Nothing
outside of the store changes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.errors import EXIT_OK, PipelineError
from tests.commands.store_commands import COMMANDS, call
from tests.hub import hub_for_this_process
from tests.jobs import run_here
from tests.store.damage_stores import Specimen, make_specimen
from tests.store.example_store import edit_root, write_image

pytestmark = pytest.mark.heavy
ARRAY = "blocks.1.resid_post"
LINKED = (  # patterns of objects and folders
    *("zarr.json", f"{ARRAY}/zarr.json", f"{ARRAY}/c.0.0.0", "tokens/c.0.0", "_commits/stream-00000/block-000000.json"),
    *("_documents/stream-00000/block-000000.parquet", "_statistics/stream-00000/block-000000.parquet"),
    *("_summary/blocks-*", "_summary/statistics-*"),
    *(ARRAY, "tokens", "_commits", "_commits/stream-00000", "_documents", "_documents/stream-00001", "_statistics"),
    *("_summary",),
)
SAMPLED = ("zarr.json", f"{ARRAY}/c.0.0.0", "tokens", "_commits/stream-00000")


@pytest.fixture(scope="module")
def specimen(tmp_path_factory) -> Specimen:
    return make_specimen("bf16", tmp_path_factory.mktemp("made"))


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[None]:
    with hub_for_this_process(tmp_path, monkeypatch):
        yield


CALLS = {  # the command and its settings
    "run": ("run",),
    "finalize": ("finalize", "force=true"),
    "index": ("finalize", "index=true"),
    "repair": ("verify", "verify.repair=true"),
    **{name: (name,) for name in COMMANDS if name != "finalize"},
}


def run(store: Path, made_by: tuple[str, ...], name: str, *more: str) -> int:
    if name != "run":
        return call(name, store, *more)
    try:
        run_here(*made_by, f"store.path={store}")
    except PipelineError as error:
        return error.exit_code
    return EXIT_OK


def link(store: Path, pattern: str) -> Path:
    """Moves an object or folder out of the store, and puts a link to it in its place. Returns where it is."""
    [path] = store.glob(pattern)
    outside = store.with_name("outside")
    path.rename(outside)
    path.symlink_to(outside)
    return outside


def snapshot(path: Path) -> dict[str, tuple[bytes, int]]:
    """The content and the time of the last change of every file."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file): (file.read_bytes(), os.stat(file).st_mtime_ns) for file in files}


@pytest.mark.parametrize(
    "pattern", [*SAMPLED, *(pytest.param(p, marks=pytest.mark.slow) for p in LINKED if p not in SAMPLED)]
)
def test_no_command_follows_a_link(specimen, pattern, tmp_path, hub, monkeypatch):
    """Most commands do not need each object; those that do, refuse the store."""
    refusing = set()
    for name, arguments in CALLS.items():
        store = tmp_path / name / "store"
        write_image(str(store), specimen.image)
        if name in ("run", "finalize"):  # so that there is something to do
            edit_root(str(store), lambda root: root.update(complete=False))
            (store / "_commits/stream-00000/block-000003.json").unlink()
        outside = link(store, pattern)
        before = snapshot(outside)
        monkeypatch.chdir(store.parent)
        if run(store, specimen.command, *arguments) != EXIT_OK:
            refusing.add(name)
        assert snapshot(outside) == before, name
    assert "verify" in refusing
    assert pattern.split("/")[0] not in (ARRAY, "tokens") or "zarr.json" in pattern or {"export", "inspect"} <= refusing
