"""A sample of a store's rows, and what it shows of every activation.

Shapes: n rows, T positions of a row, S slots of it for activations, D features of an activation.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int32

from pipeline.core.errors import StoreInvalid
from pipeline.store import ActivationStore, TokenRows
from pipeline.store.format.norms import norms_of
from pipeline.store.read.order import permutation

# Tokens whose covariance is decomposed: the spectrum has at most so many components.
SPECTRUM_TOKENS = 1024

# Token slots of whole rows to read: rows of few selected tokens are many, and of an object store each is requests.
MAX_TEXT_SLOTS = 1 << 22


@dataclass(frozen=True)
class ActivationView:
    """One activation in the sample.

    norms: [n, S], NaN where there is no token. spectrum: the shares of the variance of up to SPECTRUM_TOKENS tokens
    that their principal components have, descending. non_finite: tokens with an infinite or NaN feature; not in the
    spectrum.
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
    """Some rows of a store: `beside` their activations [n, S], a view of each activation, and the rows' `text` [n, T].

    selected: where in its row the token of each slot stands, -1 where there is none.
    """

    rows: np.ndarray
    beside: TokenRows
    views: tuple[ActivationView, ...]
    text: TokenRows
    selected: Int32[np.ndarray, "n S"]

    def norms_in_row(self, view: ActivationView, row: int) -> Float32[np.ndarray, " T"]:
        """The norms of a row's tokens, NaN where no activation is stored."""
        norms = np.full(self.text.tokens.shape[1], np.nan, np.float32)
        is_filled = self.selected[row] >= 0
        norms[self.selected[row][is_filled]] = view.norms[row][is_filled]
        return norms


def take_sample(store: ActivationStore, num_tokens: int, seed: int) -> StoreSample:
    """Random rows of about `num_tokens` slots, of at most MAX_TEXT_SLOTS positions; the same for the same store and
    seed. Raises StoreError."""
    if not store.rows.size:
        raise StoreInvalid(f"{store.path} has no rows yet: there is nothing to sample.")
    num_rows = min(len(store.rows), -(-num_tokens // store.slots), max(1, MAX_TEXT_SLOTS // store.length))
    rows = np.sort(store.rows[permutation(len(store.rows), seed)[:num_rows]])
    beside = store.read_tokens(rows)
    valid = beside.segments > 0
    views = tuple(_view(store, key.name, rows, valid) for key in store.keys)
    return StoreSample(rows, beside, views, store.read_tokens(rows, whole=True), store.read_selected(rows))


def _view(store: ActivationStore, name: str, rows: np.ndarray, valid: np.ndarray) -> ActivationView:
    key = next(key for key in store.keys if key.name == name)
    values = store.read(key.layer if key.site.per_layer else None, key.site, rows)[valid]
    norms = np.full(valid.shape, np.nan, np.float32)
    norms[valid] = norms_of(values)
    finite = np.isfinite(values).all(axis=1)
    every = -(-int(finite.sum()) // SPECTRUM_TOKENS) or 1
    return ActivationView(
        name=name,
        width=values.shape[1],
        dtype=store.arrays[name].dtype.name,
        norms=norms,
        spectrum=_spectrum(values[finite][::every].astype(np.float64)),
        non_finite=int((~finite).sum()),
    )


def _spectrum(values: Float64[np.ndarray, "n D"]) -> Float64[np.ndarray, " components"]:
    if len(values) < 2:
        return np.empty(0)
    centred = values - values.mean(axis=0)
    gram = centred @ centred.T if len(centred) < centred.shape[1] else centred.T @ centred
    variances = np.maximum(np.linalg.eigvalsh(gram)[::-1], 0)
    return variances / max(variances.sum(), np.finfo(np.float64).tiny)
