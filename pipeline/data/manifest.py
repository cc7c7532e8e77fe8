"""What a start has to know of parquet files before it reads them, in a form that one process can give to all others.

Ten thousand footers take a minute to read from remote storage; all processes of a pod, at each start, would read them
all. So one process lists the files and reads the footers, and the store keeps what it found.
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
    """One file. `row_groups` and `rows` are None where the footer was not read, or is damaged and to be skipped."""

    name: str
    size: int | None
    row_groups: int | None = None
    rows: int | None = None


@dataclass(frozen=True)
class Manifest:
    """Parquet files in the order of their names. The path of each is `folder` and its name; `info_columns` are the
    columns beside the text that the first of them has."""

    folder: str
    info_columns: tuple[str, ...]
    files: tuple[FileEntry, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Of what `to_json` of another process returned."""
        values = json.loads(text)
        files = tuple(FileEntry(**file) for file in values["files"])
        return cls(values["folder"], tuple(values["info_columns"]), files)

    def input_files(self, path: str) -> list[InputFile]:
        """The files, to be opened in the file system of `path`."""
        filesystem, _ = open_filesystem(path)
        return [InputFile(filesystem, self.folder + file.name, file.name, file.size) for file in self.files]


KnownFooters = Mapping[tuple[str, int | None], FileEntry]
"""Entries whose footers were read, by name and size, which identify a file."""


def footers_to_bytes(files: Iterable[FileEntry]) -> bytes:
    """What a store keeps: the files whose footers were read, and a digest. It does not depend on where they are."""
    known = [file for file in files if file.row_groups is not None and file.size is not None]
    entries = [[file.name, file.size, file.row_groups, file.rows] for file in known]
    content = json.dumps(entries)
    return json.dumps({"version": _VERSION, "sha256": _sha256(content), "files": entries}).encode()


def footers_from_bytes(content: bytes, where: str) -> KnownFooters:
    """Empty for content that `footers_to_bytes` did not write: the footers are then read again."""
    try:
        values = json.loads(content)
        if values["version"] != _VERSION or values["sha256"] != _sha256(json.dumps(values["files"])):
            raise ValueError("its digest is another")
        entries = [FileEntry(*file) for file in values["files"]]
        if wrong := [entry for entry in entries if not _is_possible(entry)]:
            raise ValueError(f"{wrong[0]} cannot be")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        log.warning("%s is damaged (%s): the footers of all input files are read again", where, error)
        return {}
    return {(entry.name, entry.size): entry for entry in entries}


def _is_possible(entry: FileEntry) -> bool:
    """Whether a file may be so: each row group takes some bytes of the file."""
    numbers = (entry.size, entry.row_groups, entry.rows)
    return (
        isinstance(entry.name, str)
        and all(type(number) is int and number >= 0 for number in numbers)
        and entry.row_groups <= entry.size
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def require_unchanged(file: InputFile, entry: FileEntry, row_groups: int, rows: int) -> None:
    """Raises InputError for a file whose footer is another than the manifest says."""
    if entry.row_groups is not None and (entry.row_groups, entry.rows) != (row_groups, rows):
        raise InputError(
            f"{file.path} has {row_groups} row groups and {rows} rows, expected {entry.row_groups} and {entry.rows}: "
            "it was replaced by a file of the same size. Restore it, or begin a new store."
        )
