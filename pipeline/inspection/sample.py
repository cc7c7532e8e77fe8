"""A sample of a store's rows, and the norms and spectrum of each of its activation arrays.

Shapes: n rows, T positions of a row, S slots of a row for activations, D features of an activation.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int32

from pipeline.core.errors import StoreInvalid
from pipeline.core.sites import ActivationKey
from pipeline.store import ActivationStore, TokenRows
from pipeline.store.format.normalisation import l2_norms
from pipeline.store.read.order import permutation

# The number of tokens for the spectrum, which also limits its components.
SPECTRUM_TOKENS = 1024

# The maximum number of token slots in the sampled rows. With few selected tokens per row, a sample needs many rows, and
# each row in object storage costs requests.
MAX_TEXT_SLOTS = 1 << 22


@dataclass(frozen=True)
class ActivationView:
    """One activation array in the sample.

    norms: [n, S], NaN in empty slots. spectrum: each principal component's share of the variance, descending, computed
    from up to SPECTRUM_TOKENS tokens; empty if these are all equal. non_finite: the number of tokens with an infinite
    or NaN feature, which are not part of the spectrum.
    """

    name: str
    width: int
    dtype: str
    norms: Float32[np.ndarray, "n S"]
    spectrum: Float64[np.ndarray, " components"]
    non_finite: int

    @property
    def valid_norms(self) -> Float32[np.ndarray, " tokens"]:
        return self.norms[np.isfinite(self.norms)]

    @property
    def effective_dimension(self) -> float:
        """The participation ratio of the spectrum: D for isotropic activations, 1 for a line."""
        return 1 / float(np.square(self.spectrum).sum()) if self.spectrum.size else float("nan")


@dataclass(frozen=True)
class StoreSample:
    """Some rows of a store.

    side_arrays: token ids, positions and so on of the activations [n, S]. views: one per activation array. text: token
    ids, positions and so on of the whole rows [n, T]. selected: the row position of each slot's token, -1 for empty
    slots.
    """

    rows: np.ndarray
    side_arrays: TokenRows
    views: tuple[ActivationView, ...]
    text: TokenRows
    selected: Int32[np.ndarray, "n S"]

    def norms_in_row(self, view: ActivationView, row: int) -> Float32[np.ndarray, " T"]:
        """The norms of a row's tokens; NaN for tokens without a stored activation."""
        norms = np.full(self.text.tokens.shape[1], np.nan, np.float32)
        is_filled = self.selected[row] >= 0
        norms[self.selected[row][is_filled]] = view.norms[row][is_filled]
        return norms


def take_sample(store: ActivationStore, num_tokens: int, seed: int) -> StoreSample:
    """Samples random rows with about `num_tokens` slots and at most MAX_TEXT_SLOTS positions. The same store and seed
    give the same rows. Raises StoreError."""
    if not store.rows.size:
        raise StoreInvalid(f"{store.path} has no rows yet, so there is nothing to sample.")
    num_rows = min(len(store.rows), -(-num_tokens // store.slots), max(1, MAX_TEXT_SLOTS // store.length))
    rows = np.sort(store.rows[permutation(len(store.rows), seed)[:num_rows]])
    side_arrays = store.read_tokens(rows)
    valid = side_arrays.segments > 0
    views = tuple(_view(store, key, rows, valid) for key in store.keys)
    return StoreSample(rows, side_arrays, views, store.read_tokens(rows, whole=True), store.read_selected(rows))


def _view(store: ActivationStore, key: ActivationKey, rows: np.ndarray, valid: np.ndarray) -> ActivationView:
    values = store.read(key, rows)[valid]
    norms = np.full(valid.shape, np.nan, np.float32)
    norms[valid] = l2_norms(values)
    finite = np.isfinite(values).all(axis=1)
    step = -(-int(finite.sum()) // SPECTRUM_TOKENS) or 1
    return ActivationView(
        name=key.name,
        width=values.shape[1],
        dtype=store.arrays[key.name].dtype.name,
        norms=norms,
        spectrum=_spectrum(values[finite][::step].astype(np.float64)),
        non_finite=int((~finite).sum()),
    )


def _spectrum(values: Float64[np.ndarray, "n D"]) -> Float64[np.ndarray, " components"]:
    if len(values) < 2:
        return np.empty(0)
    centred = values - values.mean(axis=0)
    gram = centred @ centred.T if len(centred) < centred.shape[1] else centred.T @ centred
    variances = np.maximum(np.linalg.eigvalsh(gram)[::-1], 0)
    total = variances.sum()
    return variances / total if total > 0 else np.empty(0)
