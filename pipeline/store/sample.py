"""Mean, variance and norms of a store's activations, from a sample of its tokens. Shapes: n tokens, D features."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64
from numpy.typing import DTypeLike

from pipeline.store.filters import norms_of


@dataclass(frozen=True)
class Normalisation:
    """activation -> (activation - mean) * scale, in float32. mean: [D] or one number; scale: likewise."""

    mean: Float32[np.ndarray, "*D"]
    scale: Float32[np.ndarray, "*D"]

    def apply(self, activations: np.ndarray, dtype: DTypeLike = None) -> np.ndarray:
        """Normalised activations [n, D], in float32 unless `dtype` is given."""
        values = activations.astype(np.float32)
        values -= self.mean
        values *= self.scale
        return values if dtype is None else values.astype(dtype, copy=False)


@dataclass(frozen=True)
class ActivationSample:
    """What a sample of n tokens says about one activation. norms: L2 norms, ascending."""

    mean: Float64[np.ndarray, " D"]
    variance: Float64[np.ndarray, " D"]
    norms: Float32[np.ndarray, " n"]

    @classmethod
    def of(cls, chunks: Iterable[np.ndarray]) -> "ActivationSample":
        """Of chunks [n, D], merged by count (Chan et al. 1979) in float64. Raises ValueError without a token."""
        count, mean, squares, norms = 0, np.zeros(()), np.zeros(()), []
        for chunk in chunks:
            values = chunk.astype(np.float64)
            here, total = len(values), count + len(values)
            delta = values.mean(axis=0) - mean
            squares = squares + values.var(axis=0) * here + delta**2 * (count * here / total)
            mean = mean + delta * (here / total)
            count = total
            norms.append(norms_of(chunk))
        if not count:
            raise ValueError("a sample needs at least one token; the filter leaves none")
        return cls(mean, squares / count, np.sort(np.concatenate(norms)))

    @property
    def num_tokens(self) -> int:
        return len(self.norms)

    def norm_quantile(self, q: float) -> float:
        """The norm that a share `q` of the sampled tokens does not exceed."""
        return float(np.quantile(self.norms, q))

    def normalisation(self, per_feature: bool = False) -> Normalisation:
        """To zero mean and unit variance: on average over the features, or each of them.

        The former keeps directions; the mean squared norm becomes D. A feature that never varies keeps its scale.
        """
        variance = self.variance if per_feature else self.variance.mean()
        scale = 1 / np.sqrt(np.where(variance > 0, variance, 1))
        return Normalisation(self.mean.astype(np.float32), scale.astype(np.float32))
