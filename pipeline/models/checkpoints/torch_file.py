"""A file in which torch.save stored a state dict (.pt, .pth, .bin), read without torch.

Since torch 1.6 it is a zip archive: a pickle says where each tensor is, and a member has the elements of each storage.
The pickle is never executed, and sizes are checked before memory is allocated.
"""

import math
from collections.abc import Mapping

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES, ByteSource, Member, TensorFile, TensorInfo
from pipeline.models.checkpoints.torch_pickle import NotAStateDict, StoredTensor, kind_of, parse_pickle
from pipeline.models.checkpoints.zip_archive import SIGNATURE, damaged, stored_members

_MAX_PICKLE = 256 << 10  # bytes; parsing takes up to 100 times as much memory; 1,000 tensors take 0.2 MB
_MAX_PER_MEMBER = 256  # bytes of a larger pickle; a tensor of a model takes 140 to 200
_SAVE_STATE = "Save only the state dict: torch.save(module.state_dict(), path)."
_OTHERS = {"f8": "F64", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8", "u1": "U8", "?": "BOOL"}
_NAMES = {np.dtype(code): name for code, name in _OTHERS.items()}  # in safetensors
_NAMES |= {dtype: name for name, dtype in FLOAT_DTYPES.items()}
_NO_TENSOR = "none"  # in place of a dtype


class TorchFile(TensorFile):
    """Tensors by name. Values that are not tensors also have names, the shape () and no dtype.

    Raises CheckpointError, which names the file, if it is damaged or contains anything that a state dict does not."""

    def __init__(self, source: ByteSource) -> None:
        if source.read(0, min(4, source.size)).tobytes() != SIGNATURE:
            raise CheckpointError(
                f"{source.name} is not a zip archive: expected a file of torch.save as written since torch 1.6, got "
                f"another, maybe older one, which is never read. Save it again, in an environment with torch: "
                f"torch.save(torch.load(path, weights_only=True), path). If it is a Git LFS pointer, download the file."
            )
        members = stored_members(source, "torch", _SAVE_STATE)
        folder = next(iter(members), "").partition("/")[0] + "/"
        self._members = {name.removeprefix(folder): members[name] for name in members if name.startswith(folder)}
        super().__init__(source, {})
        if "byteorder" in self._members and source.read_member(self._members["byteorder"]).tobytes() != b"little":
            raise self._damaged("little-endian numbers", "others")
        saved = {str(name).removeprefix("_orig_mod."): value for name, value in self._parsed().items()}  # torch.compile
        self.tensors = {name: self._info(name, value) for name, value in saved.items()}

    def contiguous(self) -> TensorFile:
        """The tensors alone, to be read by rows. Raises CheckpointError unless all are contiguous."""
        for name, info in self.tensors.items():
            if info.strides is not None:
                raise CheckpointError(
                    f"{self.name}: {name:.200} has shape {info.shape} and strides {info.strides}, expected a "
                    f"contiguous tensor. Save it as tensor.contiguous()."
                )
        return TensorFile(self._source, {name: info for name, info in self.tensors.items() if info.dtype != _NO_TENSOR})

    def _damaged(self, expected: str, got: str, remedy: str = "Download it again.") -> CheckpointError:
        return damaged(self._source, "torch", expected, got, remedy)

    def _parsed(self) -> Mapping[object, object]:
        """What the pickle contains."""
        member = self._member("data.pkl")
        most, size = max(_MAX_PICKLE, _MAX_PER_MEMBER * len(self._members)), member.stop - member.start
        if size > most:
            raise self._damaged(f"at most {most:,} bytes of data.pkl", f"{size:,}")
        stream = self._source.read_member(member).tobytes()
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

    def _info(self, name: str, value: object) -> TensorInfo:
        """Where a tensor is. Raises unless the file has its elements, and it is no larger than its storage."""
        if not isinstance(value, StoredTensor):
            return TensorInfo(_NO_TENSOR, (), 0, 0)
        member, item_bytes = self._member(f"data/{value.key}"), value.dtype.itemsize
        num_bytes, stored_bytes = value.storage_size * item_bytes, member.stop - member.start
        if num_bytes != stored_bytes:
            raise self._damaged(f"{num_bytes:,} bytes with {name:.200}", f"{stored_bytes:,}")
        num_elements = math.prod(value.shape)
        if num_elements == 0:  # its offset may be beyond the storage
            return TensorInfo(_NAMES[value.dtype], value.shape, member.start, member.start)
        spanned = 1 + sum(step * (size - 1) for step, size in zip(value.strides, value.shape, strict=True))
        if max(value.offset + spanned, num_elements) > value.storage_size:
            raise self._damaged(
                f"{name:.200} within {value.storage_size:,} elements",
                f"{num_elements:,} of them, up to {value.offset + spanned:,}",
                "Save an expanded tensor as tensor.contiguous().",
            )
        usual = [math.prod(value.shape[axis + 1 :]) for axis in range(len(value.shape))]
        used = zip(value.shape, value.strides, usual, strict=True)
        strides = None if all(size == 1 or step == usual for size, step, usual in used) else value.strides
        start = member.start + value.offset * item_bytes
        return TensorInfo(_NAMES[value.dtype], value.shape, start, start + spanned * item_bytes, strides, member)

    def _member(self, name: str) -> Member:
        member = self._members.get(name)
        if member is None:
            raise self._damaged(f"a member {name:.200}", "none")
        return member
