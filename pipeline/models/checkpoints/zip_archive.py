"""A zip archive of arrays, read by ranges: what .npz files and torch's files have in common."""

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from pipeline.core.errors import CheckpointError, PipelineError
from pipeline.core.messages import shown
from pipeline.core.range_file import RangeFile
from pipeline.models.checkpoints.safetensors_file import ByteSource

_BUFFER_BYTES = 256 << 10  # read at a time
_MAX_READ = 1 << 20  # zipfile reads the directory at once, and needs 15 times as much memory
_MAX_MEMBERS = 10_000


class ZipArchive:
    """The members of an archive, by name. Subclasses read arrays from them.

    Raises CheckpointError, which names the file, if it is damaged."""

    kind: ClassVar[str]  # of file, for messages
    methods: ClassVar[tuple[int, ...]]  # of compression
    resave: ClassVar[str] = "Download it again."  # what helps if the file is another kind of archive
    suffix: ClassVar[str] = ""  # of the members' names, which is removed

    def __init__(self, source: ByteSource) -> None:
        def read(start: int, size: int) -> bytes:
            size = size if size >= 0 else max(source.size - start, 0)
            if size > _MAX_READ:
                raise ValueError(f"a directory of {size:,} bytes, expected at most {_MAX_READ:,}")
            stop = min(start + size, source.size)
            return source.read(start, stop).tobytes() if start < stop else b""

        self.name = source.name
        with self._errors():
            self._zip = zipfile.ZipFile(io.BufferedReader(RangeFile(read, lambda: source.size), _BUFFER_BYTES))
        members = self._zip.infolist()
        if len(members) > _MAX_MEMBERS:
            raise self._damaged(f"at most {_MAX_MEMBERS:,} members", f"{len(members):,}")
        if any(member.compress_type not in self.methods for member in members):
            or_deflated = " or deflated" if zipfile.ZIP_DEFLATED in self.methods else ""
            raise self._damaged(f"members that are stored{or_deflated}", "another compression method", self.resave)
        self._members = {member.filename.removesuffix(self.suffix): member for member in members}
        if len(self._members) != len(members):
            raise self._damaged("different names for all members", "two members with the same name")

    def _damaged(self, expected: str, got: str, remedy: str = "Download it again.") -> CheckpointError:
        return CheckpointError(f"{self.name} is not a valid {self.kind} file: expected {expected}, got {got}. {remedy}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Damage makes NumPy and zipfile raise errors of a dozen kinds."""
        try:
            yield
        except (PipelineError, OSError):
            raise
        except Exception as error:
            raise self._damaged("arrays as the library saves them", shown(str(error))) from error
