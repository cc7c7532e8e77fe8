"""One safetensors file, read by ranges: the header first, then rows of single tensors.

Format: github.com/huggingface/safetensors. The header's length (8 bytes, little endian), a JSON header, and the
tensors' bytes without gaps. The `safetensors` package is not used because it maps local files only: weights may be on
object storage, where each process reads only its part, and errors must name a damaged file.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import CheckpointError
from pipeline.core.json_text import MAX_JSON_BYTES, parse_json
from pipeline.core.messages import shown

FLOAT_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_DTYPES = FLOAT_DTYPES | {  # readable dtypes
    **{"U8": np.dtype(np.uint8), "I32": np.dtype(np.int32), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}
}
_PIECE_BYTES = 16 << 20  # read at a time
_MAX_REQUESTS = 16  # concurrent requests for pieces of a remote file
_MAX_NAMED = 10  # problems of each kind in a message
_MAX_AXES, _MAX_NUMBER = 32, 2**48  # limit the product of sizes


class Member(NamedTuple):
    """Bytes start..stop-1 of a file, and their CRC-32, or 0 if it is not known."""

    start: int
    stop: int
    crc: int


@dataclass(frozen=True)
class ByteSource:
    """Bytes to be read by ranges: `read(start, stop)` returns uint8 [stop - start]."""

    name: str  # for messages
    size: int
    read: Callable[[int, int], NDArray[np.uint8]]
    is_remote: bool = False  # each read is a request, so several should run at once

    def read_large(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Reads a large range: of remote files by several concurrent requests."""
        content = np.empty(stop - start, np.uint8)

        def read_piece(offset: int) -> None:
            piece = self.read(start + offset, start + min(offset + _PIECE_BYTES, content.size))
            if piece.size != min(_PIECE_BYTES, content.size - offset):  # the file was complete when it was opened
                raise CheckpointError(f"{self.name}: expected {stop:,} bytes, got fewer. Download it again.")
            content[offset : offset + piece.size] = piece

        with ThreadPoolExecutor(_MAX_REQUESTS if self.is_remote else 1, thread_name_prefix="weights") as pool:
            list(pool.map(read_piece, range(0, content.size, _PIECE_BYTES)))
        return content

    def read_member(self, member: Member) -> NDArray[np.uint8]:
        """Reads a member, and compares its checksum."""
        content = self.read_large(member.start, member.stop)
        if member.crc and (crc := zlib.crc32(content)) != member.crc:
            raise CheckpointError(
                f"{self.name}: expected the CRC-32 {member.crc:08x} of bytes {member.start:,} to {member.stop:,}, got "
                f"{crc:08x}. Download it again."
            )
        return content


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's dtype, shape and byte range start..stop-1 in its file."""

    dtype: str  # the name in safetensors
    shape: tuple[int, ...]
    start: int
    stop: int
    strides: tuple[int, ...] | None = None  # in elements; None: C order
    member: Member | None = None  # of a zip archive, which contains the tensor


class TensorFile:
    """Tensors that lie uncompressed in a file, by name. Methods raise CheckpointError, which names the file, if it was
    cut after opening."""

    def __init__(self, source: ByteSource, tensors: Mapping[str, TensorInfo]) -> None:
        self._source, self.name, self.tensors = source, source.name, tensors

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}

    def dtype(self, name: str) -> np.dtype:
        """The dtype of a tensor. Raises CheckpointError for others than `FLOAT_DTYPES`."""
        dtype = self.tensors[name].dtype
        if dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{self.name}: {name:.200} has dtype {dtype}, expected one of {', '.join(FLOAT_DTYPES)}. Save it as "
                f"one of them."
            )
        return FLOAT_DTYPES[dtype]

    def read(self, name: str) -> np.ndarray:
        """Reads a whole tensor of floats, in C order, after comparing the checksum of the member that contains it."""
        info, dtype = self.tensors[name], self.dtype(name)
        member = info.member or Member(info.start, info.stop, crc=0)
        content = self._source.read_member(member)[info.start - member.start : info.stop - member.start]
        if info.strides is None:
            return content.view(dtype).reshape(info.shape)
        strides = [step * dtype.itemsize for step in info.strides]
        return np.ascontiguousarray(np.ndarray(info.shape, dtype, content, strides=strides))

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1 of a tensor's first axis, in its dtype (floats, F8_E4M3, U8 or I32); in C order."""
        info = self.tensors[name]
        row_bytes = (info.stop - info.start) // info.shape[0]
        raw = self._source.read(info.start + start * row_bytes, info.start + stop * row_bytes)
        if raw.size != (stop - start) * row_bytes:  # the file was complete when it was opened
            raise CheckpointError(
                f"{self.name} is not a complete file: expected {(stop - start) * row_bytes} bytes of {name}, got "
                f"{raw.size}. Download it again."
            )
        return raw.view(_DTYPES[info.dtype]).reshape(stop - start, *info.shape[1:])

    def sample(self, name: str, num_pieces: int, piece_bytes: int) -> bytes:
        """Evenly spaced pieces of a tensor's bytes, from the first to the last; all bytes of a small tensor."""
        info = self.tensors[name]
        spare = info.stop - info.start - num_pieces * piece_bytes
        if spare <= 0:
            return self._source.read(info.start, info.stop).tobytes()
        starts = [info.start + (spare * i // max(1, num_pieces - 1)) + i * piece_bytes for i in range(num_pieces)]
        return b"".join(self._source.read(start, start + piece_bytes).tobytes() for start in starts)


class SafetensorsFile(TensorFile):
    """A file with a checked header. Raises CheckpointError, which names the file, if it is damaged."""

    def __init__(self, source: ByteSource) -> None:
        header, data_start = _read_header(source)
        tensors = {name: _tensor_info(source, data_start, name, entry) for name, entry in header.items()}
        stop = max((info.stop for info in tensors.values()), default=data_start)
        if stop != source.size:
            raise _damaged(source, f"{stop} bytes", f"{source.size}")
        super().__init__(source, tensors)


def tensor_problems(expected: Mapping[str, tuple[int, ...]], info: Callable[[str], TensorInfo | None]) -> list[str]:
    """The tensors of floats, with these shapes, that are missing or have another dtype or shape."""
    problems = []
    for name, shape in expected.items():
        got = info(name)
        if got is None:
            problems.append(f"{name:.200} is missing")
        elif got.dtype not in FLOAT_DTYPES:
            problems.append(f"{name:.200} has dtype {got.dtype}, expected {', '.join(FLOAT_DTYPES)}")
        elif got.shape != shape:
            problems.append(f"{name:.200} has shape {got.shape}, expected {shape}")
    return problems


def shortened(problems: list[str]) -> list[str]:
    """The first of these problems, and the number of the others."""
    more = len(problems) - _MAX_NAMED
    return [*problems[:_MAX_NAMED], *([f"and {more} more"] if more > 0 else [])]


def _damaged(source: ByteSource, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"{source.name} is not a complete safetensors file: expected {expected}, got {got}. Download it again."
    )


def _read_header(source: ByteSource) -> tuple[Mapping[str, object], int]:
    """The header without its metadata, and the offset of the tensors' bytes."""
    if source.size < 8:
        raise _damaged(source, "at least 8 bytes", f"{source.size}")
    num_bytes = int.from_bytes(source.read(0, 8).tobytes(), "little")
    if num_bytes > source.size - 8:
        raise _damaged(source, f"a header within the file's {source.size} bytes", f"one of {num_bytes} bytes")
    if num_bytes > MAX_JSON_BYTES:
        raise _damaged(source, f"a header of at most {MAX_JSON_BYTES} bytes", f"one of {num_bytes} bytes")
    try:
        header = parse_json(source.read(8, 8 + num_bytes).tobytes())
    except ValueError as error:  # invalid JSON or UTF-8
        raise _damaged(source, "a JSON header", f"{error}") from error
    if not isinstance(header, dict):
        raise _damaged(source, "a JSON object as header", type(header).__name__)
    header.pop("__metadata__", None)
    return header, 8 + num_bytes


def _tensor_info(source: ByteSource, data_start: int, name: str, entry: object) -> TensorInfo:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        known = _DTYPES.get(dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(source, f"dtype, shape and offsets of {name:.200}", shown(entry)) from error
    numbers = (*shape, start, stop)
    if len(shape) > _MAX_AXES or not all(type(number) is int and 0 <= number < _MAX_NUMBER for number in numbers):
        raise _damaged(source, f"integers as shape and offsets of {name:.200}", shown(entry))
    num_bytes = max(stop - start, 0) if known is None else math.prod(shape) * known.itemsize
    if stop - start != num_bytes:
        raise _damaged(source, f"offsets of {name:.200} that span {num_bytes} bytes", f"{start}..{stop}")
    return TensorInfo(str(dtype)[:20], shape, data_start + start, data_start + stop)  # of any length in a damaged file
