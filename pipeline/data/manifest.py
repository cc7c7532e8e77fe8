"""The list of a source's files, which one process makes for all others, and the store keeps.

It has facts from the footers of parquet files: reading ten thousand footers from remote storage takes a minute, and
every process of a pod would do so. And it identifies the files' content, so that a changed file is noticed before a
store is extended from it.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from pipeline.data.files import InputFile, in_parallel, open_filesystem

log = logging.getLogger("pipeline")

_FORMAT = 1
_WHOLE_BYTES = 4 << 20  # of a larger file, the digest only covers samples
_SAMPLES, _SAMPLE_BYTES = 64, 16 << 10
_MAX_NAMED = 5  # changed files in a message


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file. content: what identifies its content, as `kind:value`; kind is the name of a checksum that the storage
    lists, or `sampled`. size: None if a server does not tell. `row_groups` and `rows` are None if the footer was not
    read, or is damaged and the file is skipped."""

    name: str
    size: int | None
    content: str
    row_groups: int | None = None
    rows: int | None = None

    def change(self, earlier: "FileEntry") -> str | None:
        """How this file differs from `earlier`, which has its name; None if it does not, or if the contents cannot be
        compared, because they are in different kinds of storage."""
        if self.size != earlier.size:
            return f"{self.name} ({self.size} bytes, earlier {earlier.size})"
        kinds = {entry.content.partition(":")[0] for entry in (self, earlier)}
        return f"{self.name} (other content)" if len(kinds) == 1 and self.content != earlier.content else None


@dataclass(frozen=True)
class Manifest:
    """A source's files. A file's path is `folder` + name. info_columns: the columns of the first parquet file that go
    into `Document.info`. changes: the message if they differ from those that the
    store's blocks were made from, and what to do."""

    files: tuple[FileEntry, ...]
    folder: str = ""
    info_columns: tuple[str, ...] = ()
    changes: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The inverse of `to_json`."""
        values = json.loads(text)
        files = tuple(FileEntry(**file) for file in values["files"])
        return cls(files, values["folder"], tuple(values["info_columns"]), values["changes"])

    def input_files(self, path: str) -> list[InputFile]:
        """The files, in the file system of `path`."""
        filesystem, _ = open_filesystem(path)
        return [InputFile(filesystem, self.folder + file.name, file.name, file.size) for file in self.files]

    def identity(self) -> dict[str, object]:
        """For the source's fingerprint: a digest of the files' names and sizes, which do not depend on their place."""
        listing = "\n".join(f"{file.name} {file.size}" for file in self.files)
        return {"num_files": len(self.files), "files_sha256": _sha256(listing)}

    def compared(self, earlier: Iterable[FileEntry]) -> "Manifest":
        """This manifest, with how its files differ from the earlier ones."""
        left = {entry.name: entry for entry in earlier}
        if not left:
            return self
        pairs = [(entry, left.pop(entry.name, None)) for entry in self.files]
        changes = [f"{entry.name} (new)" if old is None else entry.change(old) for entry, old in pairs]
        changes = [*filter(None, changes), *(f"{name} (missing)" for name in left)]
        if not changes:
            return self
        more = f", and {len(changes) - _MAX_NAMED:,} more" if len(changes) > _MAX_NAMED else ""
        described = (
            "the input files are not those that the store was made from: "
            f"{', '.join(changes[:_MAX_NAMED])}{more}. Restore these files, or choose a different store.path"
        )
        return replace(self, changes=described)


MakeManifest = Callable[[], Manifest]


def make_alone(make: MakeManifest) -> Manifest:
    """The manifest outside of a job, where no other process has one."""
    return make()


def file_entries(files: Sequence[InputFile]) -> tuple[FileEntry, ...]:
    """The files' entries, without facts from footers. Raises PipelineError for a file that cannot be read."""

    def entry(file: InputFile) -> FileEntry:
        return FileEntry(file.name, file.size, file.checksum or f"sampled:{_sampled_sha256(file)}")

    return tuple(in_parallel(entry, files))


def _sampled_sha256(file: InputFile) -> str:
    """The sha256 of a small file, or of evenly spaced parts of a large one, among them its beginning and its end."""
    digest = hashlib.sha256()
    with file.open() as stream:
        if file.size is None or file.size <= _WHOLE_BYTES:
            digest.update(stream.read(_WHOLE_BYTES))
        else:
            for number in range(_SAMPLES):
                stream.seek((file.size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def entries_to_bytes(files: Iterable[FileEntry]) -> bytes:
    """What a store keeps: the files, and a digest. Does not depend on the files' location."""
    entries = [list(asdict(file).values()) for file in files]
    return json.dumps({"version": _FORMAT, "sha256": _sha256(json.dumps(entries)), "files": entries}).encode()


def entries_from_bytes(content: bytes, where: str) -> Sequence[FileEntry]:
    """The inverse of `entries_to_bytes`. Damaged content gives () and a warning."""
    try:
        values = json.loads(content)
        if values["version"] != _FORMAT or values["sha256"] != _sha256(json.dumps(values["files"])):
            raise ValueError("its digest does not match")
        entries = tuple(FileEntry(*file) for file in values["files"])
        if not all(isinstance(text, str) for entry in entries for text in (entry.name, entry.content)):
            raise ValueError("a name is no text")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        log.warning("%s is damaged (%s): changed input files are not noticed at this start", where, error)
        return ()
    return entries


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
