"""A file in which torch.save stored a state dict (.pt, .pth, .bin), read without torch.

Since torch 1.6 it is a zip archive: a pickle says where each tensor is, and a member has the elements of each storage.
The pickle is never executed, and sizes are checked before memory is allocated.
"""

import math
import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.safetensors_file import (
    FLOAT_DTYPES,
    ByteSource,
    TensorFile,
    TensorInfo,
    float_dtype,
)
from pipeline.models.checkpoints.torch_pickle import NotAStateDict, StoredTensor, kind_of, parse_pickle
from pipeline.models.checkpoints.zip_archive import ZipArchive

_HEADER = struct.Struct("<4s22xHH")  # of a member: its signature, and the lengths of its name and extra field
_SIGNATURE = b"PK\3\4"
_MAX_PICKLE = 256 << 10  # bytes; parsing takes up to 100 times as much memory; 1,000 tensors take 0.2 MB
_MAX_PER_MEMBER = 256  # bytes of a larger pickle; a tensor of a model takes 140 to 200
_SAVE_STATE = "Save only the state dict: torch.save(module.state_dict(), path)."
_OPENING_THREADS = 32  # many, since reads from object storage mostly wait
_OTHERS = {"f8": "F64", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8", "u1": "U8", "?": "BOOL"}
_NAMES = {np.dtype(code): name for code, name in _OTHERS.items()}  # in safetensors
_NAMES |= {dtype: name for name, dtype in FLOAT_DTYPES.items()}


class TorchFile(ZipArchive):
    """Tensors by name. Values that are not tensors also have names, and the shape ().

    Raises CheckpointError, which names the file, if it is damaged or contains anything that a state dict does not."""

    kind, methods, resave = "torch", (zipfile.ZIP_STORED,), _SAVE_STATE

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        if source.read(0, min(4, source.size)).tobytes() != _SIGNATURE:
            raise CheckpointError(
                f"{source.name} is not a zip archive: expected a file of torch.save as written since torch 1.6, got "
                f"another, maybe older one, which is never read. Save it again, in an environment with torch: "
                f"torch.save(torch.load(path, weights_only=True), path). If it is a Git LFS pointer, download the file."
            )
        super().__init__(source)
        self._folder = next(iter(self._members), "").partition("/")[0]
        if f"{self._folder}/byteorder" in self._members and self._read_member("byteorder").tobytes() != b"little":
            raise self._damaged("little-endian numbers", "others")
        saved = self._parsed()
        self._values = {str(name).removeprefix("_orig_mod."): value for name, value in saved.items()}  # torch.compile's
        self._tensors = {name: value for name, value in self._values.items() if isinstance(value, StoredTensor)}
        for name, tensor in self._tensors.items():
            self._check(name, tensor)
        self.shapes = dict.fromkeys(self._values, ()) | {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> np.dtype:
        """The dtype of a tensor."""
        value = self._values[name]
        return float_dtype(self.name, name, _NAMES[value.dtype] if isinstance(value, StoredTensor) else "none")

    def contiguous(self) -> TensorFile:
        """The tensors, to be read by ranges. Raises CheckpointError unless all are contiguous."""
        keys = {tensor.key for tensor in self._tensors.values()}
        with ThreadPoolExecutor(_OPENING_THREADS) as pool:
            starts = dict(zip(keys, pool.map(lambda key: self._start(f"data/{key}"), keys), strict=True))
        infos = {name: _info(tensor, starts[tensor.key]) for name, tensor in self._tensors.items()}
        for name, info in infos.items():
            if info is None:
                raise CheckpointError(
                    f"{self.name}: {name:.200} has shape {self.shapes[name]} and strides "
                    f"{self._tensors[name].strides}, expected a contiguous tensor. Save it as tensor.contiguous()."
                )
        return TensorFile(self._source, infos)

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor, in C order."""
        self.dtype(name)
        return self._array(self._values[name])

    def number(self, name: str) -> float:
        """A plain number, or that in a tensor with one element."""
        value = self._values[name]
        if isinstance(value, StoredTensor) and set(value.shape) <= {1}:
            value = self._array(value).item()
        if type(value) not in (int, float) or not -1e30 < value < 1e30:
            raise CheckpointError(f"{self.name}: expected a finite number as {name:.200}, got none. Download it again.")
        return value

    def _parsed(self) -> dict:
        """What the pickle contains."""
        most, size = max(_MAX_PICKLE, _MAX_PER_MEMBER * len(self._members)), self._member("data.pkl").file_size
        if size > most:
            raise self._damaged(f"at most {most:,} bytes of data.pkl", f"{size:,}")
        stream = self._read_member("data.pkl").tobytes()
        try:
            saved = parse_pickle(stream)
            if type(saved) is not dict:
                raise NotAStateDict(f"{kind_of(saved)} in place of a dict")
        except (ValueError, LookupError, TypeError) as error:
            got = error if isinstance(error, NotAStateDict) else "a damaged pickle"
            raise CheckpointError(
                f"{self.name} is not a state dict saved by torch: expected tensors and plain values in a dict, got "
                f"{got}. Nothing in it was executed. {_SAVE_STATE}"
            ) from error
        return saved

    def _array(self, tensor: StoredTensor) -> np.ndarray:
        size = tensor.dtype.itemsize
        strides = [stride * size for stride in tensor.strides]
        offset = 0 if 0 in tensor.shape else tensor.offset  # of an empty tensor, it may be beyond the storage
        elements = self._read_member(f"data/{tensor.key}")
        return np.array(np.ndarray(tensor.shape, tensor.dtype, elements, offset * size, strides), order="C", copy=None)

    def _check(self, name: str, tensor: StoredTensor) -> None:
        """Raises unless the file has the tensor's elements, and it is no larger than its storage."""
        num_bytes, member = tensor.storage_size * tensor.dtype.itemsize, self._member(f"data/{tensor.key}")
        if not num_bytes == member.file_size == member.compress_size:
            raise self._damaged(f"{num_bytes:,} bytes with {name:.200}", f"{member.file_size:,}")
        last = tensor.offset + sum(step * (size - 1) for step, size in zip(tensor.strides, tensor.shape, strict=True))
        num_elements = math.prod(tensor.shape)
        if num_elements and max(last + 1, num_elements) > tensor.storage_size:
            raise self._damaged(
                *(f"{name:.200} within {tensor.storage_size:,} elements", f"{num_elements:,} of them, up to {last:,}"),
                "Save an expanded tensor as tensor.contiguous().",
            )

    def _member(self, name: str) -> zipfile.ZipInfo:
        member = self._members.get(f"{self._folder}/{name}")
        if member is None:
            raise self._damaged(f"a member {name:.200}", "none")
        return member

    def _start(self, name: str) -> int:
        """Where a member's bytes begin: after its header, whose length is not in the directory."""
        member, size = self._member(name), self._source.size
        offset, stop = member.header_offset, member.header_offset + _HEADER.size
        if offset >= 0 and stop <= size:
            signature, *sizes = _HEADER.unpack(self._source.read(offset, stop).tobytes())
            start = stop + sum(sizes)
            if signature == _SIGNATURE and start + member.file_size <= size:
                return start
        raise self._damaged(f"{name:.200} with {member.file_size:,} bytes at {offset:,}", f"{size:,} bytes in all")

    def _read_member(self, name: str) -> np.ndarray:
        """All bytes of a member, after comparing their checksum; 0 is none."""
        member, start = self._member(name), self._start(name)
        content = self._source.read_large(start, start + member.file_size)
        if member.CRC and zlib.crc32(content) != member.CRC:
            raise self._damaged(f"{name:.200} with the checksum {member.CRC:08x}", f"{zlib.crc32(content):08x}")
        return content


def _info(tensor: StoredTensor, start: int) -> TensorInfo | None:
    """Where a tensor is in the file; None unless it is contiguous. `start` is that of its storage."""
    num_elements, step = math.prod(tensor.shape), 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if num_elements and size != 1 and stride != step:
            return None
        step *= size
    start += tensor.offset * tensor.dtype.itemsize if num_elements else 0
    return TensorInfo(_NAMES[tensor.dtype], tensor.shape, start, start + num_elements * tensor.dtype.itemsize)
