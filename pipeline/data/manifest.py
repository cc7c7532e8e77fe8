"""The list of parquet files, with facts from their footers, that one process makes for all others.

Reading ten thousand footers from remote storage takes a minute, and every process of a pod would do so at each start.
So one process lists the files and reads the footers, and the store keeps the result.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from pipeline.core.errors import InputError
from pipeline.data.files import InputFile, open_filesystem

log = logging.getLogger("pipeline")

_VERSION = 1


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file. `row_groups` and `rows` are None if the footer was not read, or is damaged and the file is skipped."""

    name: str
    size: int | None
    row_groups: int | None = None
    rows: int | None = None


@dataclass(frozen=True)
class Manifest:
    """Parquet files, sorted by name. A file's path is `folder` + name. info_columns: the columns of the first file that
    go into `Document.info`."""

    folder: str
    info_columns: tuple[str, ...]
    files: tuple[FileEntry, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The inverse of `to_json`."""
        values = json.loads(text)
        files = tuple(FileEntry(**file) for file in values["files"])
        return cls(values["folder"], tuple(values["info_columns"]), files)

    def input_files(self, path: str) -> list[InputFile]:
        """The files, in the file system of `path`."""
        filesystem, _ = open_filesystem(path)
        return [InputFile(filesystem, self.folder + file.name, file.name, file.size) for file in self.files]


KnownFooters = Mapping[tuple[str, int | None], FileEntry]
"""Entries with facts from the footer, by name and size, which identify a file."""


def footers_to_bytes(files: Iterable[FileEntry]) -> bytes:
    """What a store keeps: the files whose footers were read, and a digest. Does not depend on the files' location."""
    known = [file for file in files if file.row_groups is not None and file.size is not None]
    entries = [[file.name, file.size, file.row_groups, file.rows] for file in known]
    content = json.dumps(entries)
    return json.dumps({"version": _VERSION, "sha256": _sha256(content), "files": entries}).encode()


def footers_from_bytes(content: bytes, where: str) -> KnownFooters:
    """The inverse of `footers_to_bytes`. Damaged content gives {} and a warning: the footers are then read again."""
    try:
        values = json.loads(content)
        if values["version"] != _VERSION or values["sha256"] != _sha256(json.dumps(values["files"])):
            raise ValueError("its digest does not match")
        entries = [FileEntry(*file) for file in values["files"]]
        if wrong := [entry for entry in entries if not _is_possible(entry)]:
            raise ValueError(f"{wrong[0]} is impossible")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        log.warning("%s is damaged (%s): reading the footers of all input files again", where, error)
        return {}
    return {(entry.name, entry.size): entry for entry in entries}


def _is_possible(entry: FileEntry) -> bool:
    """Whether the numbers are possible: each row group takes some bytes of the file."""
    numbers = (entry.size, entry.row_groups, entry.rows)
    return (
        isinstance(entry.name, str)
        and all(type(number) is int and number >= 0 for number in numbers)
        and entry.row_groups <= entry.size
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def require_unchanged(file: InputFile, entry: FileEntry, row_groups: int, rows: int) -> None:
    """Raises InputError if a file's footer differs from its entry in the manifest."""
    if entry.row_groups is not None and (entry.row_groups, entry.rows) != (row_groups, rows):
        raise InputError(
            f"{file.path} has {row_groups} row groups and {rows} rows, expected {entry.row_groups} and {entry.rows}: "
            "it was replaced by a file of the same size. Restore it, or create a new store."
        )
