"""Zip archives of arrays, read by ranges: .npz files, and what torch's files have in common with them.

Members are stored without compression, so an array is a range of the file's bytes, and nothing is allocated that the
file does not contain.
"""

import io
import math
import struct
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from pipeline.core.errors import CheckpointError, PipelineError
from pipeline.core.messages import shown
from pipeline.core.range_file import RangeFile
from pipeline.models.checkpoints.safetensors_file import ByteSource, Member, TensorFile, TensorInfo

_BUFFER_BYTES = 256 << 10  # read at a time
_MAX_READ = 1 << 20  # zipfile reads the directory at once, and needs 15 times as much memory
_MAX_MEMBERS = 10_000
_OPENING_THREADS = 32  # many, since reads from object storage mostly wait
_HEADER = struct.Struct("<4s22xHH")  # of a member: its signature, and the lengths of its name and extra field
SIGNATURE = b"PK\3\4"
_NPZ_DTYPES = {np.dtype("<f4"): "F32", np.dtype("<f2"): "F16"}
_MAX_HEADER = 256  # bytes of an array's header. NumPy evaluates it as a literal: longer ones may exhaust the stack


class NpzFile(TensorFile):
    """An .npz file of np.savez, read without pickle. Raises CheckpointError, which names the file, if it is damaged or
    an array is not float32 or float16.

    https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html"""

    kind = ".npz"

    def __init__(self, source: ByteSource) -> None:
        members = stored_members(source, self.kind, "Save it again with np.savez, which does not compress.")
        arrays = {name.removesuffix(".npy"): member for name, member in members.items()}
        if len(arrays) != len(members):
            raise damaged(source, self.kind, "different names for all arrays", "two arrays with the same name")
        super().__init__(source, {name: _npz_array(source, name, member) for name, member in arrays.items()})


def _npz_array(source: ByteSource, name: str, member: Member) -> TensorInfo:
    file = io.BytesIO(source.read(member.start, min(member.stop, member.start + 2 * _MAX_HEADER)).tobytes())
    with zip_errors(source, NpzFile.kind):
        if (version := np.lib.format.read_magic(file)) != (1, 0):  # others may have headers of gigabytes
            raise ValueError(f"version {version} of the .npy format")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=_MAX_HEADER)
    if dtype not in _NPZ_DTYPES:
        remedy = "Pickled objects are never read. " if dtype.hasobject else ""
        raise CheckpointError(
            f"{source.name}: {name:.200} has dtype {dtype}, expected float32 or float16. {remedy}Save it as one of "
            f"them."
        )
    start, num_bytes = member.start + file.tell(), math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or start + num_bytes != member.stop:
        raise damaged(source, NpzFile.kind, f"{num_bytes} bytes of {name:.200} {shape}", f"{member.stop - start}")
    strides = tuple(math.prod(shape[:axis]) for axis in range(len(shape))) if is_fortran else None
    return TensorInfo(_NPZ_DTYPES[dtype], shape, start, member.stop, strides, member)


def stored_members(source: ByteSource, kind: str, resave: str) -> Mapping[str, Member]:
    """The members of an archive, by name. `kind` of file is for messages, `resave` what helps if it is compressed.

    Raises CheckpointError, which names the file, if it is damaged."""

    def read(start: int, size: int) -> bytes:
        size = size if size >= 0 else max(source.size - start, 0)
        if size > _MAX_READ:
            raise ValueError(f"a directory of {size:,} bytes, expected at most {_MAX_READ:,}")
        stop = min(start + size, source.size)
        return source.read(start, stop).tobytes() if start < stop else b""

    with zip_errors(source, kind):
        archive = zipfile.ZipFile(io.BufferedReader(RangeFile(read, lambda: source.size), _BUFFER_BYTES))
    infos = archive.infolist()
    if len(infos) > _MAX_MEMBERS:
        raise damaged(source, kind, f"at most {_MAX_MEMBERS:,} members", f"{len(infos):,}")
    if any(info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size for info in infos):
        raise damaged(source, kind, "members that are stored", "compressed ones", resave)
    if len({info.filename for info in infos}) != len(infos):
        raise damaged(source, kind, "different names for all members", "two members with the same name")

    def member(info: zipfile.ZipInfo) -> Member:
        """Its bytes begin after its header, whose length is not in the directory."""
        offset, stop = info.header_offset, info.header_offset + _HEADER.size
        if offset >= 0 and stop <= source.size:
            signature, *sizes = _HEADER.unpack(source.read(offset, stop).tobytes())
            start = stop + sum(sizes)
            if signature == SIGNATURE and start + info.file_size <= source.size:
                return Member(start, start + info.file_size, info.CRC)
        expected = f"{info.filename:.200} with {info.file_size:,} bytes at {offset:,}"
        raise damaged(source, kind, expected, f"{source.size:,} bytes in all")

    with ThreadPoolExecutor(_OPENING_THREADS) as pool:
        return dict(zip((info.filename for info in infos), pool.map(member, infos), strict=True))


def damaged(
    source: ByteSource, kind: str, expected: str, got: str, remedy: str = "Download it again."
) -> CheckpointError:
    return CheckpointError(f"{source.name} is not a valid {kind} file: expected {expected}, got {got}. {remedy}")


@contextmanager
def zip_errors(source: ByteSource, kind: str) -> Iterator[None]:
    """Damage makes NumPy and zipfile raise errors of a dozen kinds."""
    try:
        yield
    except (PipelineError, OSError):
        raise
    except Exception as error:
        raise damaged(source, kind, "arrays as the library saves them", shown(str(error))) from error
