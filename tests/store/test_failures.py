"""Errors for failures of real file systems say what the user can do."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorstore as ts

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.io.failures import DAMAGE_REMEDY, storage_errors


def kvstore(path: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "file", "path": f"{path}/"}).result()


def fill_the_disk(_root: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def write_to_a_read_only_disk(_root: Path) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def write_below_a_file(root: Path) -> None:
    kvstore(root / "file").write("key", b"x").result()


def write_over_a_folder(root: Path) -> None:
    kvstore(root).write("folder", b"x").result()


def read_beyond_the_end(root: Path) -> None:
    kvstore(root).read("file", byte_range=slice(0, 8)).result()


@pytest.mark.parametrize(
    ("operation", "error", "remedy"),
    [
        (fill_the_disk, StoreError, "The disk is full. Free space, then run the same command again; it resumes."),
        (write_to_a_read_only_disk, StoreError, "Choose a different store.path, or make this one writable."),
        (write_below_a_file, StoreInvalid, "A file or a folder is in the way: choose a different store.path."),
        (write_over_a_folder, StoreInvalid, "A file or a folder is in the way: choose a different store.path."),
        (read_beyond_the_end, StoreInvalid, DAMAGE_REMEDY),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_failure_has_its_remedy(tmp_path, operation: Callable[[Path], None], error, remedy):
    root = tmp_path / "permission denied, no space left"  # words of a path do not determine the remedy
    (root / "folder").mkdir(parents=True)
    (root / "file").write_text("")
    with pytest.raises(StoreError) as caught, storage_errors("the store"):
        operation(root)
    assert type(caught.value) is error
    assert str(caught.value).startswith("the store: ")
    assert str(caught.value).endswith(f". {remedy}")


def write_a_wrong_shape(root: Path) -> None:
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}}
    ts.open(spec, create=True, shape=[4], dtype=ts.int32).result()[:2].write([0, 0, 0]).result()


@pytest.mark.parametrize(
    ("mistake", "error"),
    [(lambda _: int("x"), ValueError), (lambda _: 1 / 0, ArithmeticError), (write_a_wrong_shape, ValueError)],
)
def test_mistakes_in_the_program_are_raised_unchanged(tmp_path, mistake: Callable[[Path], object], error):
    with pytest.raises(error), storage_errors("the store"):
        mistake(tmp_path)
