"""A file in which torch.save stored a state dict (.pt, .pth, .bin), read without torch.

Since torch 1.6 it is a zip archive: a pickle says where each tensor is, and a member has the elements of each storage.
The pickle is never executed, and sizes are checked before memory is allocated.
"""

import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
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
_IS_UTF8 = 0x800  # a flag of a member: its name is not in code page 437
_SIGNATURE = b"PK\3\4"
_MAX_PICKLE = 256 << 10  # bytes; parsing takes up to 100 times as much memory; 1,000 tensors take 0.2 MB
_SAVE_STATE = "Save only the state dict: torch.save(module.state_dict(), path)."
_MAX_DEPTH, _MAX_VALUES, _MAX_NAME = 8, 10_000, 1_000
_MAX_PER_MEMBER = 256  # bytes of a larger pickle; a tensor of a model takes 140 to 200
_OPENING_THREADS = 32  # many, since reads from object storage mostly wait
_OTHERS = {"f8": "F64", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8", "u1": "U8", "?": "BOOL"}
_NAMES = {np.dtype(code): name for code, name in _OTHERS.items()}  # in safetensors
_NAMES |= {dtype: name for name, dtype in FLOAT_DTYPES.items()}


class TorchFile(ZipArchive):
    """Tensors by name; names in nested dicts are joined by dots. Values that are not tensors also have names, and the
    shape ().

    Raises CheckpointError, which names the file, if it is damaged or contains anything that a state dict does not."""

    kind, methods, resave = "torch", (zipfile.ZIP_STORED,), _SAVE_STATE

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        if self._source.read(0, min(4, self._source.size)).tobytes() != _SIGNATURE:
            raise CheckpointError(
                f"{self._source.name} is not a zip archive: expected a file of torch.save as written since torch 1.6, "
                f"got another, maybe older one, which is never read. Save it again, in an environment with torch: "
                f"torch.save(torch.load(path, weights_only=True), path). If it is a Git LFS pointer, download the file."
            )
        super().__init__(self._source)
        self._has_checksums = any(member.CRC for member in self._members.values())  # or set_crc32_options(False)
        self._folder = next(iter(self._members), "").partition("/")[0]
        if f"{self._folder}/byteorder" in self._members and self._read_small("byteorder") != b"little":
            raise self._damaged("little-endian numbers", "others")
        stream = self._read_small("data.pkl")
        try:
            self._values = _named_values(parse_pickle(stream))
        except (ValueError, LookupError, TypeError) as error:
            got = error if isinstance(error, NotAStateDict) else "a damaged pickle"
            raise CheckpointError(
                f"{self.name} is not a state dict saved by torch: expected tensors and plain values in dicts, got "
                f"{got}. Nothing in it was executed. {_SAVE_STATE}"
            ) from error
        tensors = {name: value for name, value in self._values.items() if isinstance(value, StoredTensor)}
        for name, tensor in tensors.items():
            self._check(name, tensor)
        self.shapes = dict.fromkeys(self._values, ()) | {name: tensor.shape for name, tensor in tensors.items()}

    def dtype(self, name: str) -> np.dtype:
        """The dtype of a tensor."""
        value = self._values[name]
        return float_dtype(self.name, name, _NAMES[value.dtype] if isinstance(value, StoredTensor) else "none")

    def contiguous(self) -> TensorFile:
        """The tensors, to be read by ranges, without checksums. Raises CheckpointError unless all are contiguous."""
        tensors = {name: value for name, value in self._values.items() if isinstance(value, StoredTensor)}
        keys = {tensor.key for tensor in tensors.values()}
        with ThreadPoolExecutor(_OPENING_THREADS) as pool:
            starts = dict(zip(keys, pool.map(lambda key: self._start(f"data/{key}"), keys), strict=True))
        infos = {name: _info(tensor, starts[tensor.key]) for name, tensor in tensors.items()}
        for name, info in infos.items():
            if info is None:
                raise CheckpointError(
                    f"{self.name}: {name:.200} has shape {tensors[name].shape} and strides {tensors[name].strides}, "
                    f"expected a contiguous tensor. Save it as tensor.contiguous()."
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

    def _array(self, tensor: StoredTensor) -> np.ndarray:
        elements = self._read_member(f"data/{tensor.key}")
        size = tensor.dtype.itemsize
        strides = [stride * size for stride in tensor.strides]
        with self._errors():
            if 0 in tensor.shape:  # its offset may be beyond the storage
                return np.empty(tensor.shape, tensor.dtype)
            values = np.ndarray(tensor.shape, tensor.dtype, elements, tensor.offset * size, strides)
        return np.array(values, order="C", copy=None)

    def _check(self, name: str, tensor: StoredTensor) -> None:
        """Raises unless the file has the tensor's elements, each at a place of its own."""
        num_bytes, member = tensor.storage_size * tensor.dtype.itemsize, self._member(f"data/{tensor.key}")
        if not num_bytes == member.file_size == member.compress_size:
            raise self._damaged(f"{num_bytes:,} bytes with {name:.200}", f"{member.file_size:,}")
        if 0 in tensor.shape:
            return
        last = 0
        for stride, size in sorted(zip(tensor.strides, tensor.shape, strict=True)):
            if size > 1 and stride <= last:
                raise self._damaged(
                    *(f"strides of {name:.200} without overlaps", f"{tensor.strides} for {tensor.shape}"),
                    "Save an expanded tensor as tensor.contiguous().",
                )
            last += stride * (size - 1)
        if tensor.offset + last >= tensor.storage_size:
            raise self._damaged(
                f"{name:.200} within {tensor.storage_size:,} elements", f"one up to {tensor.offset + last:,}"
            )

    def _member(self, name: str) -> zipfile.ZipInfo:
        member = self._members.get(f"{self._folder}/{name}")
        if member is None:
            raise self._damaged(f"a member {name:.200}", "none")
        return member

    def _read_small(self, name: str) -> bytes:
        most = max(_MAX_PICKLE, _MAX_PER_MEMBER * len(self._members))
        if (num_bytes := self._member(name).file_size) > most:
            raise self._damaged(f"at most {most:,} bytes of {name}", f"{num_bytes:,}")
        return self._read_member(name).tobytes()

    def _start(self, name: str) -> int:
        """Where a member's bytes begin, after comparing their place with the file's size."""
        member = self._member(name)
        start, size = member.header_offset + _HEADER.size, member.file_size
        if not _HEADER.size <= start <= self._source.size:
            raise self._damaged(f"{name:.200} within {self._source.size:,} bytes", f"it at {start:,}")
        expected = member.orig_filename.encode("utf-8" if member.flag_bits & _IS_UTF8 else "cp437")
        stop = min(start + len(expected), self._source.size)
        header = self._source.read(member.header_offset, stop).tobytes()
        signature, name_size, extra_size = _HEADER.unpack_from(header)
        saved_name = header[_HEADER.size :]
        start += name_size + extra_size
        if signature != _SIGNATURE or saved_name != expected or name_size != len(expected):
            raise self._damaged(f"the member {name:.200} at {start:,}", "another or none")
        if start + size > self._source.size:
            raise self._damaged(f"{size:,} bytes of {name:.200} at {start:,}", f"{self._source.size:,} in all")
        return start

    def _read_member(self, name: str) -> np.ndarray:
        """All bytes of a member, after comparing their checksum."""
        member, start = self._member(name), self._start(name)
        size = member.file_size
        content = self._source.read_large(start, start + size)
        if self._has_checksums and zlib.crc32(content) != member.CRC:
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


def _named_values(saved: object) -> dict[str, object]:
    """All values in dicts, by the keys that lead to them."""
    if type(saved) is not dict:
        raise NotAStateDict(f"{kind_of(saved)} in place of a dict")
    values: dict[str, object] = {}
    for name, value in _walk(saved, "", 0):
        name = name.removeprefix("_orig_mod.")  # of a module that torch.compile has wrapped
        if name in values:
            raise NotAStateDict(f"two values with the name {name}")
        if len(values) == _MAX_VALUES:
            raise NotAStateDict(f"more than {_MAX_VALUES:,} values")
        values[name] = value
    return values


def _walk(value: object, name: str, depth: int) -> Iterator[tuple[str, object]]:
    if type(value) is not dict or not value:  # an empty dict counts as a value, so that _MAX_VALUES limits all dicts
        yield name, value
        return
    if depth == _MAX_DEPTH:
        raise NotAStateDict(f"dicts nested more than {_MAX_DEPTH} levels deep")
    for key, child in value.items():
        path = f"{name}.{key}" if name else str(key)
        if len(path) > _MAX_NAME:
            raise NotAStateDict(f"a name of {len(path):,} characters")
        yield from _walk(child, path, depth + 1)
