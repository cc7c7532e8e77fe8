"""In a local store every object is a file. Anything else is reported by verify, and refused by readers and by jobs that
resume the store. None of them treats it as a missing object, or hangs."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import pytest

from pipeline.core.errors import EXIT_FAILED, EXIT_INVALID, StoreInvalid
from pipeline.store import ActivationStore
from pipeline.store.format.commits import commit_key
from pipeline.store.format.layout import POSITIONS
from pipeline.store.format.tables import table_key
from pipeline.verify import main
from tests.store.example_store import WIDTHS, copy_store, layout, write_store

EMBED = next(spec for spec in layout().arrays if spec.name == "embed")
SHARDS = [layout().shard_key(spec, 0, 1) for spec in (EMBED, POSITIONS)]
OPENED = ["zarr.json", "embed/zarr.json", commit_key(0, 1)]
KEYS = [*OPENED, table_key(0, 1), *SHARDS]
LINK = "a symbolic link or in a linked directory, expected the store's own file"


def pipe(path: Path, cleanup: ExitStack) -> None:
    os.mkfifo(path)
    # With its other end open, a pipe does not hang the test if it is opened by mistake.
    cleanup.callback(os.close, os.open(path, os.O_RDWR))


PLACED: dict[str, Callable[[Path, ExitStack], None]] = {
    "link to nothing": lambda path, _: path.symlink_to("nowhere"),
    "folder": lambda path, _: path.mkdir(),
    "pipe": pipe,
    "device": lambda path, _: path.symlink_to("/dev/null"),  # only root may make a device
}


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def problem(kind: str) -> str:
    return "a folder, a pipe or a device, expected a file" if kind in ("folder", "pipe") else LINK


def put(store: Path, key: str, kind: str, cleanup: ExitStack) -> None:
    path = store / key
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    PLACED[kind](path, cleanup)


def read_everything(path: Path) -> None:
    store = ActivationStore.open(path)
    for name in WIDTHS:
        store.read(name, store.rows)
    store.read_tokens(store.rows)
    assert store.documents()
    list(store.batches(list(WIDTHS), 8))


@pytest.mark.parametrize(
    ("key", "kind"),
    list(zip(KEYS, cycle(("folder", "link to nothing", "pipe", "device")), strict=False)),
)
def test_verify_reports_it_and_a_reader_refuses_it(tmp_path, key, kind, cleanup, capsys):
    copy_store(str(tmp_path))
    put(tmp_path, key, kind, cleanup)
    assert main([f"store.path={tmp_path}"]) == (EXIT_INVALID if key == "zarr.json" else EXIT_FAILED)
    named = rf"{key}:? .*is {problem(kind)}"
    if kind == "folder" and key == commit_key(0, 1):  # listings leave folders out
        named = "no readable record of block 1"
    assert re.search(named, "".join(capsys.readouterr()))
    if key != "embed/zarr.json":  # readers do not read it
        with pytest.raises(StoreInvalid, match=f"/{key} is {problem(kind)}"):
            read_everything(tmp_path)


@pytest.mark.parametrize(("key", "kind"), [*zip(OPENED, ("folder", "pipe", "device"), strict=True)])
def test_a_job_that_resumes_the_store_refuses_it(tmp_path, key, kind, cleanup):
    copy_store(str(tmp_path), finish=False)
    last = commit_key(0, 3) if key == commit_key(0, 1) else key
    put(tmp_path, last, kind, cleanup)
    with pytest.raises(StoreInvalid, match=f"/{last} is {problem(kind)}") as caught:
        write_store(str(tmp_path))
    assert caught.value.exit_code == EXIT_INVALID
