"""A sample of a store's rows, and the norms of each of its activation arrays.

Shapes: n rows, T positions of a row, S slots of a row for activations.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32

from pipeline.core.errors import StoreInvalid
from pipeline.core.sites import ActivationKey
from pipeline.store import ActivationStore, TokenRows
from pipeline.store.format.statistics import l2_norms
from pipeline.store.read.order import permutation

HEADER = ["array", "dtype", "d", "mean norm", "median", "99 %", "maximum", "not finite"]


@dataclass(frozen=True)
class ActivationView:
    """One activation array in the sample. norms: infinite for a token with an infinite or NaN feature; NaN where no
    activation is stored."""

    name: str
    width: int
    dtype: str
    norms: Float32[np.ndarray, "n T"]

    @property
    def finite_norms(self) -> Float32[np.ndarray, " tokens"]:
        return self.norms[np.isfinite(self.norms)]

    def table_row(self) -> list[str]:
        """The cells in the order of HEADER."""
        norms, not_finite = self.finite_norms, int(np.isinf(self.norms).sum())
        values = [norms.mean(), *np.quantile(norms, (0.5, 0.99)), norms.max()] if norms.size else [math.nan] * 4
        return [self.name, self.dtype, str(self.width), *map(number, values), str(not_finite)]


@dataclass(frozen=True)
class StoreSample:
    """Some rows of a store. text: token ids, positions and so on of the whole rows, [n, T]. views: one per array."""

    rows: np.ndarray
    text: TokenRows
    views: tuple[ActivationView, ...]


def take_sample(store: ActivationStore, num_tokens: int, seed: int) -> StoreSample:
    """Samples random rows with about `num_tokens` positions. The same store and seed give the same rows. Raises
    StoreError."""
    if not store.rows.size:
        raise StoreInvalid(f"{store.path} has no rows yet, so there is nothing to sample.")
    rows = np.sort(store.rows[permutation(len(store.rows), seed)[: -(-num_tokens // store.length)]])
    selected = store.read_selected(rows)
    views = tuple(_view(store, key, rows, selected) for key in store.keys)
    return StoreSample(rows, store.read_tokens(rows, whole=True), views)


def _view(
    store: ActivationStore, key: ActivationKey, rows: np.ndarray, selected: Int32[np.ndarray, "n S"]
) -> ActivationView:
    is_stored = selected >= 0
    values = store.read(key, rows)[is_stored]
    norms = np.full((len(rows), store.length), np.nan, np.float32)
    is_finite = np.isfinite(values).all(axis=1)
    norms[np.nonzero(is_stored)[0], selected[is_stored]] = np.where(is_finite, l2_norms(values), np.inf)
    return ActivationView(key.name, values.shape[1], store.arrays[key.name].dtype.name, norms)


def number(value: float) -> str:
    """A number in short form: 0.25, 12, 34k, 1.2M."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= scale:
            return f"{value / (1e3 if suffix == 'k' else scale):.4g}{suffix}"
    return f"{value:.4g}"
