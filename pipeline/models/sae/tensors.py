"""The tensors of an SAE's file, by their names in the file."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.checkpoint_files import Files, read_bytes
from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES, SafetensorsFile


class Tensors(Protocol):
    """Tensors by name. Methods raise CheckpointError for damaged files and dtypes other than 16- and 32-bit floats."""

    name: str  # the file's name, for messages
    shapes: Mapping[str, tuple[int, ...]]

    def dtype(self, name: str) -> np.dtype:
        """The dtype of a tensor."""

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor, in C order."""


class SafetensorsTensors:
    """The tensors of a safetensors file. A remote file is read by several concurrent requests."""

    def __init__(self, files: Files, name: str) -> None:
        self._source, self._is_remote = files.open(name), files.is_remote
        self._file = SafetensorsFile(self._source)
        self.name = self._file.name
        self.shapes = {name: info.shape for name, info in self._file.tensors.items()}

    def dtype(self, name: str) -> np.dtype:
        dtype = self._file.tensors[name].dtype
        if dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{self.name}: {name:.200} has dtype {dtype}, expected one of {', '.join(FLOAT_DTYPES)}. Save it as "
                f"one of them."
            )
        return FLOAT_DTYPES[dtype]

    def read(self, name: str) -> np.ndarray:
        info = self._file.tensors[name]
        content = read_bytes(self._source, info.start, info.stop, self._is_remote)
        return content.view(self.dtype(name)).reshape(info.shape)
