"""An .npz file, read without pickle: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

Sizes are checked before memory is allocated: a damaged or hostile file may declare any shape, and a few bytes may
decompress to gigabytes.
"""

import math
import zipfile

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.safetensors_file import ByteSource
from pipeline.models.checkpoints.zip_archive import ZipArchive

_DTYPES = (np.dtype("<f4"), np.dtype("<f2"))
_MAX_HEADER = 256  # bytes of an array's header. NumPy evaluates it as a literal: longer ones may exhaust the stack
_MAX_RATIO = 20  # compression ratio of a large array; weights compress by less than 2
_SMALL_BYTES = 16 << 20  # smaller arrays may have any ratio, such as zeros


class NpzFile(ZipArchive):
    """Arrays by name. Raises CheckpointError, which names the file, if it is damaged or an array is not float32 or
    float16."""

    kind, suffix, methods = ".npz", ".npy", (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the methods that NumPy writes

    def __init__(self, source: ByteSource) -> None:
        super().__init__(source)
        self.shapes = {name: self._header(name)[0] for name in self._members}

    def dtype(self, name: str) -> np.dtype:
        """The dtype of an array."""
        return self._header(name)[1]

    def read(self, name: str) -> np.ndarray:
        """Reads an array, in C order."""
        with self._errors(), self._zip.open(self._members[name]) as file:
            values = np.lib.format.read_array(file, allow_pickle=False, max_header_size=_MAX_HEADER)
            if file.read(1):  # at the end of the file, zipfile compares the checksum
                raise ValueError(f"bytes after {name}")
        return np.ascontiguousarray(values)

    def _header(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """An array's shape and dtype."""
        member = self._members[name]
        with self._errors(), self._zip.open(member) as file:
            if (version := np.lib.format.read_magic(file)) != (1, 0):  # others may have headers of gigabytes
                raise ValueError(f"version {version} of the .npy format")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=_MAX_HEADER)
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
        return shape, dtype
