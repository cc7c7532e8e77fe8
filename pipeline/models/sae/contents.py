"""What a format's module finds in a checkpoint: the specification, and how each of its arrays is made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.sae.spec import ARRAYS, SAESpec
from pipeline.models.sae.tensors import Tensors

Change = Callable[[np.ndarray], np.ndarray]


def multiplied(factor: float) -> Change:
    """Values times a factor, in float32."""
    return lambda values: values * np.float32(factor)


def divided(divisor: float) -> Change:
    """Values divided by a number, in float32."""
    return lambda values: values / np.float32(divisor)


@dataclass(frozen=True)
class Source:
    """A tensor of the file, and what makes an array of it."""

    tensor: str
    axes: str  # of the tensor, in the letters of `ARRAYS`: "FD" is stored with a row for each feature
    change: Change | None = None  # float32 values in our order of axes to float32 values


@dataclass(frozen=True)
class Contents:
    """A checkpoint whose tensors are there, with the shapes that its configuration says. Made by `checked`."""

    format: str
    spec: SAESpec
    hook_name: str | None
    tensors: Tensors
    sources: Mapping[str, Source | float]  # by our names; a number stands for an array that has it everywhere

    def shape(self, name: str) -> tuple[int, ...]:
        return self.spec.axis_sizes(ARRAYS[name])

    def read(self, name: str) -> np.ndarray:
        """An array of `ARRAYS`, in the file's dtype, in float32 where it is computed. Raises CheckpointError."""
        source = self.sources[name]
        if not isinstance(source, Source):
            return np.full(self.shape(name), source, np.float32)
        values = self.tensors.read(source.tensor)
        self._check_finite(values, f"{source.tensor} has")
        if source.axes == ARRAYS[name][::-1]:
            values = values.T
        if source.change is not None:
            with np.errstate(over="ignore"):  # what is infinite is refused by name
                values = source.change(values.astype(np.float32, copy=False))
            self._check_finite(values, f"{name}, computed from {source.tensor}, would have")
        return np.ascontiguousarray(values)

    def _check_finite(self, values: np.ndarray, subject: str) -> None:
        num_wrong = sum(int(row.size - np.isfinite(row).sum()) for row in np.atleast_2d(values))
        if num_wrong:
            raise CheckpointError(
                f"{self.tensors.name}: {subject} {num_wrong:,} values that are infinite or NaN, expected finite ones. "
                f"Download the file again, or use another SAE."
            )


def checked(contents: Contents, ignored: Sequence[str] = ()) -> Contents:
    """The contents, if the file has just their tensors, but for ignored ones. Raises CheckpointError otherwise."""
    shapes, where = contents.tensors.shapes, contents.tensors.name
    sources = [source for source in contents.sources.values() if isinstance(source, Source)]
    expected = {source.tensor: contents.spec.axis_sizes(source.axes) for source in sources}
    if missing := [name for name in expected if name not in shapes]:
        raise CheckpointError(
            f"{where} has no {', '.join(missing)}: expected {', '.join(expected)}, got {_names(shapes)}. Is it an SAE "
            f"of the architecture that its configuration says?"
        )
    if unexpected := sorted(shapes.keys() - expected.keys() - {*ignored}):
        raise CheckpointError(
            f"{where} has {_names(unexpected)}, which an SAE of its architecture has not; expected "
            f"{', '.join(expected)}. Use another SAE: what the tensor does would be missing."
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            is_transposed = len(shape) == 2 and shapes[name] == shape[::-1]
            raise CheckpointError(
                f"{where}: {name} has shape {shapes[name]}, expected {shape}"
                + (", so it is transposed. Save it in the format's order of axes." if is_transposed else "")
                + ("" if is_transposed else " of its configuration. Is it the file of another SAE?")
            )
        contents.tensors.dtype(name)
    return contents


def _names(names: object) -> str:
    some = sorted(str(name)[:200] for name in names)
    return ", ".join(some[:20]) + (f" and {len(some) - 20} more" if len(some) > 20 else "")
