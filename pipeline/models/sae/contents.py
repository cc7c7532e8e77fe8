"""What a format's module reads from a checkpoint: the SAE's specification, and how to make each of its arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.sae.spec import ARRAYS, SAESpec
from pipeline.models.sae.tensors import Tensors

Change = Callable[[np.ndarray], np.ndarray]


def multiply_by(factor: float) -> Change:
    """Multiplies values by a factor, in float32."""
    return lambda values: values * np.float32(factor)


def divide_by(divisor: float) -> Change:
    """Divides values by a number, in float32."""
    return lambda values: values / np.float32(divisor)


@dataclass(frozen=True)
class Source:
    """A tensor in the file, and how an array is made from it."""

    tensor: str
    axes: str  # the tensor's axes, in the letters of `ARRAYS`: "FD" has a row per feature
    change: Change | None = None  # a function of the float32 values, in our order of axes


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint. Formats return it from `check_tensors`."""

    format: str
    spec: SAESpec
    hook_name: str | None
    tensors: Tensors
    sources: Mapping[str, Source | float]  # by our names; a number stands for an array filled with it

    def shape(self, name: str) -> tuple[int, ...]:
        return self.spec.axis_sizes(ARRAYS[name])

    def read(self, name: str) -> np.ndarray:
        """Reads an array of `ARRAYS`, in the file's dtype, or in float32 if it is computed. Raises CheckpointError."""
        source = self.sources[name]
        if not isinstance(source, Source):
            return np.full(self.shape(name), source, np.float32)
        values = self.tensors.read(source.tensor)
        self._check_finite(values, f"{source.tensor} has")
        if source.axes == ARRAYS[name][::-1]:
            values = values.T
        if source.change is not None:
            with np.errstate(over="ignore"):  # infinite values are refused below
                values = source.change(values.astype(np.float32, copy=False))
            self._check_finite(values, f"{name}, computed from {source.tensor}, would have")
        return np.ascontiguousarray(values)

    def _check_finite(self, values: np.ndarray, subject: str) -> None:
        num_wrong = sum(int(row.size - np.isfinite(row).sum()) for row in np.atleast_2d(values))
        if num_wrong:
            raise CheckpointError(
                f"{self.tensors.name}: {subject} {num_wrong:,} values that are infinite or NaN, expected finite "
                f"values. Download the file again, or use another SAE."
            )


def check_tensors(contents: Contents, ignored: Sequence[str] = ()) -> Contents:
    """Returns the contents if the file has exactly their tensors, with the expected shapes, except for `ignored` ones.
    Raises CheckpointError otherwise."""
    shapes, where = contents.tensors.shapes, contents.tensors.name
    sources = [source for source in contents.sources.values() if isinstance(source, Source)]
    expected = {source.tensor: contents.spec.axis_sizes(source.axes) for source in sources}
    if missing := [name for name in expected if name not in shapes]:
        raise CheckpointError(
            f"{where} has no {', '.join(missing)}: expected {', '.join(expected)}, got {_names(shapes)}. Does the SAE "
            f"have the architecture that its configuration states?"
        )
    if unexpected := sorted(shapes.keys() - expected.keys() - {*ignored}):
        raise CheckpointError(
            f"{where} has {_names(unexpected)}, which its architecture does not have; expected {', '.join(expected)}. "
            f"Use another SAE: this program would ignore the tensor."
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            is_transposed = len(shape) == 2 and shapes[name] == shape[::-1]
            raise CheckpointError(
                f"{where}: {name} has shape {shapes[name]}, expected {shape}"
                + (", so it is transposed. Save it in the format's order of axes." if is_transposed else "")
                + ("" if is_transposed else " from its configuration. Does the file belong to another SAE?")
            )
        contents.tensors.dtype(name)
    return contents


def _names(names: object) -> str:
    texts = sorted(str(name)[:200] for name in names)
    return ", ".join(texts[:20]) + (f" and {len(texts) - 20} more" if len(texts) > 20 else "")
