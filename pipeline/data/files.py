"""Finding input files: a file, a directory or a glob, local or on any file system that fsspec knows."""

from dataclasses import dataclass

import fsspec
from fsspec import AbstractFileSystem

from pipeline.errors import InputError


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file. `name` is its path below the place that was given, so that it does not depend on the machine."""

    filesystem: AbstractFileSystem
    path: str
    name: str
    size: int

    def read_bytes(self) -> bytes:
        return self.filesystem.cat_file(self.path)


def find_files(path: str, suffix: str) -> list[InputFile]:
    """The files of `path` in order of their names; of a directory, those at any depth whose names end with `suffix`.

    Raises InputError when there is none.
    """
    filesystem, root = fsspec.core.url_to_fs(path)
    if any(character in root for character in "*?["):
        found = {name: info for name, info in filesystem.glob(root, detail=True).items() if info["type"] == "file"}
        fixed = root[: min(root.index(character) for character in "*?[" if character in root)]
        base = fixed.rpartition("/")[0]
    elif filesystem.isdir(root):
        found = {name: info for name, info in filesystem.find(root, detail=True).items() if name.endswith(suffix)}
        base = root.rstrip("/")
    elif filesystem.exists(root):
        found = {root: filesystem.info(root)}
        base = root.rpartition("/")[0]
    else:
        found, base = {}, root
    files = [InputFile(filesystem, file, file[len(base) :].lstrip("/"), info["size"]) for file, info in found.items()]
    files = [file for file in files if not any(part.startswith((".", "_")) for part in file.name.split("/"))]
    if not files:
        raise InputError(f"{path} has no {suffix} file. Set data.path to a file, a directory or a glob that has some.")
    return sorted(files, key=lambda file: file.name)
