"""A trained SAE or transcoder: its specification, and how its arrays are made from the tensors of a file."""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.models.architecture import without_defaults
from pipeline.models.checkpoints.safetensors_file import TensorFile, shortened, tensor_problems
from pipeline.models.sae.spec import ARRAYS, SAEContext, SAESpec

Change = Callable[[np.ndarray], np.ndarray]


def multiply_by(factor: float) -> Change:
    """Multiplies values by a factor, in float32."""
    return lambda values: values * np.float32(factor)


def divide_by(divisor: float) -> Change:
    """Divides values by a number, in float32."""
    return lambda values: values / np.float32(divisor)


@dataclass(frozen=True)
class TensorSource:
    """A tensor in the file, and how an array is made from it."""

    tensor: str
    axes: str  # the tensor's axes, in the letters of `ARRAYS`: "FD" has a row per feature
    change: Change | None = None  # a function of the float32 values, in our order of axes


Sources = dict[str, TensorSource | float]
"""By our names; a number stands for an array filled with it."""


def coder_sources(
    axes: str,
    w_enc: str,
    b_enc: str,
    w_dec: str,
    b_out: str,
    *,
    subtracts_bias: bool = False,
    factors: tuple[float, float] | None = None,
) -> Sources:
    """The arrays that every SAE with a decoder has, from tensors of these names. `axes` are those of the two matrices,
    such as "DF FO". With `subtracts_bias`, the output's bias is first subtracted from the input. `factors` of inputs
    and outputs are folded in, like in SAELens' `fold_activation_norm_scaling_factor`."""
    scale, unscale = (None, None) if factors is None else (multiply_by(factors[0]), divide_by(factors[1]))
    encoder_axes, decoder_axes = axes.split()
    sources: Sources = {
        "w_enc": TensorSource(w_enc, encoder_axes, scale),
        "b_enc": TensorSource(b_enc, "F"),
        "w_dec": TensorSource(w_dec, decoder_axes, unscale),
        "b_out": TensorSource(b_out, "O", unscale),
    }
    return sources | ({"b_in": TensorSource(b_out, "D", unscale)} if subtracts_bias else {})


@dataclass(frozen=True, eq=False)
class SAE:
    """A trained sparse autoencoder or transcoder, from `open_sae`. Its arrays have the names of `spec.ARRAYS`, and are
    read on request.

    Methods raise CheckpointError for damaged files, and PipelineError if a retry might help.
    """

    format: str  # the name of the module in `formats`, without or with a version
    spec: SAESpec
    hook_name: str | None  # what it was trained on, if its file says so: `blocks.12.hook_resid_post`
    tensors: TensorFile
    sources: Sources
    context: SAEContext = field(default_factory=SAEContext)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Array name -> shape."""
        return {name: self.spec.axis_sizes(ARRAYS[name]) for name in self.sources}

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays, as `read` returns them."""
        return {name: self.read(name) for name in self.shapes}

    @property
    def identity(self) -> str:
        """The digest of the specification and all arrays."""
        return self.digest(self.shapes)

    def digest(self, names: Collection[str]) -> str:
        """A SHA-256 over the specification and all bytes of the named arrays, which are read one at a time. It does not
        depend on the address or the format."""
        digest = hashlib.sha256(json.dumps(without_defaults(self.spec)).encode())
        for name in sorted(names):
            values = self.read(name)
            digest.update(json.dumps([name, values.dtype.name, values.shape]).encode())
            digest.update(values.view(np.uint8))
        return digest.hexdigest()

    def read(self, name: str) -> np.ndarray:
        """Reads an array, C-ordered, in the file's dtype (float32, float16 or bfloat16), or in float32 if it is
        computed from the file's tensors. All values are finite."""
        source = self.sources[name]
        if not isinstance(source, TensorSource):
            return np.full(self.shapes[name], source, np.float32)
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


def check_tensors(sae: SAE, ignored: Sequence[str] = ()) -> SAE:
    """Returns the SAE if its file has exactly its tensors, with the expected shapes, except for `ignored` ones. Raises
    CheckpointError otherwise."""
    tensors = sae.tensors.tensors
    sources = [source for source in sae.sources.values() if isinstance(source, TensorSource)]
    expected = {source.tensor: sae.spec.axis_sizes(source.axes) for source in sources}
    problems = tensor_problems(expected, tensors.get)
    problems += [f"{name:.200} is unexpected" for name in sorted(tensors.keys() - expected.keys() - {*ignored})]
    if problems:
        raise CheckpointError(
            f"{sae.tensors.name} does not have the tensors expected from its configuration: "
            f"{'; '.join(shortened(problems))}. Use another SAE, or the configuration that belongs to this one."
        )
    return sae


def axis_sizes(tensors: TensorFile, axes: Mapping[str, str]) -> dict[str, int]:
    """The sizes of axes by their letters, from the shapes of tensors whose axes are given; the first tensor with a
    letter has its size. Raises CheckpointError if a tensor is missing, or has another number of axes."""
    shapes = {name: tensors.shapes.get(name, ()) for name in axes}
    if any(len(shapes[name]) != len(axes[name]) for name in axes):
        expected = ", ".join(f"{name} with the axes {' '.join(letters)}" for name, letters in axes.items())
        got = shown_names(f"{name} {shape}" for name, shape in tensors.shapes.items())
        raise CheckpointError(f"{tensors.name}: expected {expected}, got {got}. Is it another SAE's file?")
    sizes: dict[str, int] = {}
    for name, letters in axes.items():
        sizes = dict(zip(letters, shapes[name], strict=True)) | sizes
    return sizes


def read_number(tensors: TensorFile, name: str, above: float = -math.inf) -> float:
    """The finite number above `above` in a tensor without axes. Raises CheckpointError if there is none."""
    value = float(tensors.read(name)) if tensors.shapes.get(name) == () else None
    if value is None or not above < value < math.inf:
        raise CheckpointError(
            f"{tensors.name}: expected a finite number above {above:g} as {name}, got {value}. Download it again."
        )
    return value


def shown_names(names: Iterable[object]) -> str:
    """Names for messages, sorted and shortened."""
    texts = sorted(str(name)[:200] for name in names)
    return ", ".join(texts[:20]) + (f" and {len(texts) - 20} more" if len(texts) > 20 else "")
