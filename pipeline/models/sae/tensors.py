"""The tensors of an SAE's file, by their names in the file."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES, SafetensorsFile

_PIECE_BYTES = 16 << 20  # read at a time
_MAX_REQUESTS = 16  # concurrent requests for pieces of a tensor in a remote file


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
        self._file = SafetensorsFile(files.open(name))
        self._num_threads = _MAX_REQUESTS if files.is_remote else 1
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
        values = np.empty(self.shapes[name], self.dtype(name))
        step = max(1, _PIECE_BYTES * len(values) // max(1, values.nbytes))

        def read_piece(start: int) -> None:
            stop = min(start + step, len(values))
            values[start:stop] = self._file.rows(name, start, stop)

        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="sae") as pool:
            list(pool.map(read_piece, range(0, len(values), step)))
        return values
