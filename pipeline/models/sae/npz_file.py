"""An .npz file, read without pickle: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

Sizes are checked before memory is allocated: a damaged or hostile file may declare any shape, and a few bytes may
decompress to gigabytes.
"""

import io
import math
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.core.json_text import shown
from pipeline.models.checkpoints.safetensors_file import ByteSource

_DTYPES = (np.dtype("<f4"), np.dtype("<f2"))
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}  # of a header's length, by version of the format
_HEADER = re.compile(  # as NumPy writes it; its own reader evaluates a literal, on which crafted ones crash
    r"\{'descr': '(?P<dtype>[<>|=]?\w+)', 'fortran_order': (?P<order>True|False), "
    r"'shape': \((?P<shape>[\dL, ]*)\),? *\}\s*"
)
_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the methods that NumPy writes
_BUFFER_BYTES, _PIECE_BYTES = 256 << 10, 16 << 20  # read at a time: for headers, for values
_MAX_HEADER = 10_000  # bytes of an array's header
_MAX_ARRAYS = 1_000
_MAX_RATIO = 20  # compression ratio of a large array; weights compress by less than 2
_SMALL_BYTES = 16 << 20  # smaller arrays may have any ratio, such as zeros


class NpzFile:
    """Arrays by name. Raises CheckpointError, which names the file, if it is damaged or an array is not float32 or
    float16."""

    def __init__(self, source: ByteSource) -> None:
        self.name = source.name
        with self._errors():
            raw = io.BufferedReader(_RangeReader(source), _BUFFER_BYTES)
            self._zip = zipfile.ZipFile(raw)
        members = self._zip.infolist()
        if len(members) > _MAX_ARRAYS:
            raise self._damaged(f"at most {_MAX_ARRAYS} arrays", f"{len(members)}")
        if any(member.compress_type not in _COMPRESSION for member in members):
            raise self._damaged("arrays that are stored or deflated", "another compression method")
        self._members = {member.filename.removesuffix(".npy"): member for member in members}
        if len(self._members) != len(members):
            raise self._damaged("different names for all arrays", "two arrays with the same name")
        self.shapes = {name: self._header(name)[0] for name in self._members}

    def dtype(self, name: str) -> np.dtype:
        """The dtype of an array."""
        return self._header(name)[2]

    def read(self, name: str) -> np.ndarray:
        """Reads an array, in C order."""
        shape, is_fortran, dtype = self._header(name)
        values = np.empty(math.prod(shape), dtype)
        with self._errors(), self._zip.open(self._members[name]) as file:
            _read_header(file)
            content, start = memoryview(values.view(np.uint8)), 0
            while num_read := file.readinto(content[start : start + _PIECE_BYTES]):
                start += num_read
            rest = file.read(1)  # at the end of the file, zipfile compares the checksum
        if start != values.nbytes or rest:
            raise self._damaged(f"{values.nbytes} bytes of {name}", f"{start}")
        return np.ascontiguousarray(values.reshape(shape[::-1]).T) if is_fortran else values.reshape(shape)

    def _header(self, name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
        """An array's shape, whether it is in Fortran order, and its dtype."""
        member = self._members[name]
        with self._errors(), self._zip.open(member) as file:
            shape, is_fortran, dtype = _read_header(file)
            num_bytes = member.file_size - file.tell()
        if dtype not in _DTYPES:
            remedy = "Pickled objects are never read. " if dtype.hasobject else ""
            raise CheckpointError(
                f"{self.name}: {name:.200} has dtype {dtype}, expected float32 or float16. {remedy}Save it as one of "
                f"them."
            )
        if num_bytes != math.prod(shape) * dtype.itemsize:
            raise self._damaged(f"{math.prod(shape) * dtype.itemsize} bytes of {name:.200} {shape}", f"{num_bytes}")
        if num_bytes > max(_SMALL_BYTES, _MAX_RATIO * member.compress_size):
            raise self._damaged(
                f"{name:.200} of at most {_MAX_RATIO} times its {member.compress_size} compressed bytes",
                f"{num_bytes}",
            )
        return shape, is_fortran, dtype

    def _damaged(self, expected: str, got: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name} is not a valid .npz file: expected {expected}, got {got}. Download it again."
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise self._damaged("arrays saved by NumPy", shown(str(error))) from error


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version not in _LENGTH_BYTES:
        raise ValueError(f"version {version} of the .npy format")
    length = int.from_bytes(file.read(_LENGTH_BYTES[version]), "little")
    header = file.read(min(length, _MAX_HEADER)).decode("latin1")
    match = _HEADER.fullmatch(header)
    if match is None or length > _MAX_HEADER:
        raise ValueError(f"a header of {length} bytes: {header:.80}")
    shape = tuple(map(int, re.findall(r"\d+", match["shape"])))
    try:
        return shape, match["order"] == "True", np.dtype(match["dtype"])
    except TypeError as error:
        raise ValueError(f"dtype {match['dtype']:.80}") from error


class _RangeReader(io.RawIOBase):
    """A file object for zipfile. Each read is one call of `ByteSource.read`."""

    def __init__(self, source: ByteSource) -> None:
        super().__init__()
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: bytearray) -> int:
        stop = min(self._position + len(buffer), self._source.size)
        if stop <= self._position:
            return 0
        content = self._source.read(self._position, stop)
        buffer[: content.size] = memoryview(content)
        self._position += content.size
        return content.size
