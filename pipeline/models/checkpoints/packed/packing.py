"""What the formats of packed weights have in common: a matrix is several tensors in the file, its parts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

import numpy as np

from pipeline.models.checkpoints.json_config import JsonConfig
from pipeline.models.checkpoints.safetensors_file import TensorInfo

Read = Callable[..., np.ndarray]
"""Reads rows of a tensor in the file: `read(name, start, stop)`, or all of them: `read(name)`."""


class QuantizationConfig(JsonConfig):
    """The `quantization_config` of config.json."""

    user, results = "checkpoint, such as the one from which it was quantised", "activations"


class Packing(ABC):
    """A format. Its constructor reads the `QuantizationConfig`, and raises CheckpointError for values that are not
    implemented."""

    suffixes: ClassVar[tuple[str, ...]]  # of the names of a matrix' parts
    optional: ClassVar[tuple[str, ...]] = ()  # suffixes of parts that may be missing
    ending: ClassVar[str] = ""  # of the matrix' name, in place of these suffixes

    def parts(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Matrix -> the names of its parts, if all of them are among `names`, those of the file's tensors."""
        last, found = self.suffixes[-1], {}
        for start in (name.removesuffix(last) for name in names if name.endswith(last)):
            if all(start + suffix in names for suffix in self.suffixes):
                optional = [suffix for suffix in self.optional if start + suffix in names]
                found[start + self.ending] = tuple(start + suffix for suffix in (*self.suffixes, *optional))
        return found

    @abstractmethod
    def info(self, *parts: TensorInfo) -> TensorInfo:
        """The matrix' shape, and float32 as its dtype. If the parts do not match, the dtype or shape tells."""

    @abstractmethod
    def rows(self, read: Read, parts: tuple[str, ...], start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1 of the matrix, in float32."""
