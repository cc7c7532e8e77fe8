"""What `inspect` shows of a store: a sample of its rows with the norms of each activation array, and what some features
of an SAE fire on.

Shapes: T positions of a row, S slots of a row for activations, n rows of the sample or firings of a feature, F features
of the SAE, c tokens of a context, m contexts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32, Int64

from pipeline.core.errors import ConfigError, StoreInvalid
from pipeline.core.sites import ActivationKey
from pipeline.store import ActivationStore, TokenRows
from pipeline.store.format.keys import features_name
from pipeline.store.format.statistics import l2_norms
from pipeline.store.io.failures import VERIFY_REMEDY
from pipeline.store.read.order import permutation
from pipeline.store.read.stored_statistics import FeatureStatistics

NORMS_HEADER = ["array", "dtype", "d", "mean norm", "median", "99 %", "maximum", "not finite"]
TOKENS_BEFORE, TOKENS_AFTER = 28, 12  # in a context, around the strongest firing
# If a feature fires more than MAX_FIRINGS times, only its TOP_PER_CONTEXT strongest firings per context are read.
MAX_FIRINGS, TOP_PER_CONTEXT = 5_000_000, 64
EXTREMES = 4  # how many of the most frequent, and of the least frequent, features are shown by default

FEATURES_HEADER = ["features of", "number", "L0", "explained", "never", "in > 1 %", "in > 10 %"]


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
        """The cells in the order of NORMS_HEADER."""
        norms, not_finite = self.finite_norms, int(np.isinf(self.norms).sum())
        values = [norms.mean(), *np.quantile(norms, (0.5, 0.99)), norms.max()] if norms.size else [math.nan] * 4
        return [self.name, self.dtype, str(self.width), *(f"{value:.4g}" for value in values), str(not_finite)]


@dataclass(frozen=True)
class StoreSample:
    """Some rows of a store. text: token ids, positions and so on of the whole rows, [n, T]. views: one per array."""

    rows: np.ndarray
    text: TokenRows
    views: tuple[ActivationView, ...]


def take_sample(store: ActivationStore, num_tokens: int, seed: int) -> StoreSample | None:
    """Samples random rows with about `num_tokens` positions; None if the store has no rows yet. The same store and seed
    give the same rows. Raises StoreError."""
    if not store.rows.size:
        return None
    rows = np.sort(store.rows[permutation(len(store.rows), seed)[: -(-num_tokens // store.length)]])
    selected = store.read_selected(rows)
    views = tuple(_norms(store, key, rows, selected) for key in store.keys)
    return StoreSample(rows, store.read_tokens(rows, whole=True), views)


def _norms(
    store: ActivationStore, key: ActivationKey, rows: np.ndarray, selected: Int32[np.ndarray, "n S"]
) -> ActivationView:
    is_stored = selected >= 0
    values = store.read(key, rows)[is_stored]
    norms = np.full((len(rows), store.length), np.nan, np.float32)
    is_finite = np.isfinite(values).all(axis=1)
    norms[np.nonzero(is_stored)[0], selected[is_stored]] = np.where(is_finite, l2_norms(values), np.inf)
    return ActivationView(key.name, values.shape[1], store.arrays[key.name].dtype.name, norms)


@dataclass(frozen=True)
class Context:
    """Tokens around a firing, in one window of a document.

    values: the feature's values, 0 where it does not fire, NaN where a token's features are not stored. strongest: the
    index of the row's strongest firing among these tokens. document: the document's number. position: the firing's
    position in its window.
    """

    tokens: Int32[np.ndarray, " c"]
    values: Float32[np.ndarray, " c"]
    strongest: int
    row: int
    document: int
    position: int


@dataclass(frozen=True)
class FeatureView:
    """One feature. values: of its firings; only of the strongest if they are more than MAX_FIRINGS."""

    feature: int
    values: Float32[np.ndarray, " n"]
    contexts: tuple[Context, ...]


@dataclass(frozen=True)
class SAEView:
    """An SAE of a store, and some of its features."""

    name: str
    statistics: FeatureStatistics
    features: tuple[FeatureView, ...]


def view_features(
    store: ActivationStore, sae: str | None = None, features: Sequence[int] = (), contexts: int = 8
) -> SAEView | None:
    """Reads some features of an SAE. None if the store has no SAE whose features can be shown, and none is asked for.
    Raises ConfigError for an SAE or features that the store does not have, and StoreError.

    sae: its name; None for the store's first. features: () for those that fire most and least often. contexts: the
    maximum number per feature.
    """
    can_show = store.metadata.has_statistics and len(store.blocks)
    names = [name.removeprefix("features.") for name in store.metadata.indexed_features] if can_show else []
    if not (names or sae or features):
        return None
    name = sae or next(iter(names), None)
    if name not in names:
        raise ConfigError(
            f"inspect.sae={sae}, inspect.features={list(features)}: {store.path} has an index by feature, and "
            f"statistics, of: {', '.join(names) or 'no SAE'}. Choose one of these; see capture.encode."
        )
    statistics = store.feature_statistics(name)
    width = len(statistics.count)
    if wrong := [feature for feature in features if feature >= width]:
        raise ConfigError(
            f"inspect.features contains {wrong[0]}, but {name} has features 0 to {width - 1}. Choose among these."
        )
    chosen = features or most_and_least_frequent(statistics.count, EXTREMES)
    views = (_feature(store, name, feature, int(statistics.count[feature]), contexts) for feature in chosen)
    return SAEView(name, statistics, tuple(views))


def most_and_least_frequent(count: Int64[np.ndarray, " F"], num: int) -> tuple[int, ...]:
    """The `num` features that fire most often, and the `num` that fire least often but at least once, in descending
    order of count."""
    order = np.argsort(-count, kind="stable")
    order = order[count[order] > 0]
    return tuple(order.tolist() if len(order) <= 2 * num else [*order[:num].tolist(), *order[-num:].tolist()])


def _feature(store: ActivationStore, name: str, feature: int, count: int, num_contexts: int) -> FeatureView:
    firings = store.feature(name, feature, None if count <= MAX_FIRINGS else num_contexts * TOP_PER_CONTEXT)
    strongest = np.argsort(-firings.values, kind="stable")
    of_rows = np.sort(np.unique(firings.rows[strongest], return_index=True)[1])  # each row's strongest
    chosen = strongest[of_rows[:num_contexts]]
    contexts = _contexts(store, name, feature, firings.rows[chosen], firings.slots[chosen])
    return FeatureView(feature, firings.values, contexts)


def _contexts(
    store: ActivationStore, name: str, feature: int, rows: Int64[np.ndarray, " m"], slots: Int64[np.ndarray, " m"]
) -> tuple[Context, ...]:
    text, selected = store.read_tokens(rows, whole=True), store.read_selected(rows)
    parts = [f"{features_name(name)}.{part}" for part in ("index", "value")]
    index, value = map(store.read_outputs(rows, parts).get, parts)
    is_stored = selected >= 0
    values = np.full((len(rows), store.length), np.nan, np.float32)
    values[np.nonzero(is_stored)[0], selected[is_stored]] = np.where(index == feature, value, 0).sum(axis=2)[is_stored]
    contexts = []
    for n, position in enumerate(selected[np.arange(len(rows)), slots].tolist()):
        if position < 0 or not values[n, position] > 0:
            raise StoreInvalid(
                f"{store.path}: the index by feature has a firing of feature {feature} of {name} in row {rows[n]}, "
                f"slot {slots[n]}, where the arrays have none. {VERIFY_REMEDY}"
            )
        window = np.flatnonzero(text.segments[n] == text.segments[n, position])
        window = window[(window >= position - TOKENS_BEFORE) & (window <= position + TOKENS_AFTER)]
        contexts.append(
            Context(
                text.tokens[n, window],
                values[n, window],
                int(np.searchsorted(window, position)),
                int(rows[n]),
                int(text.documents[n, position]),
                int(text.positions[n, position]),
            )
        )
    return tuple(contexts)


def features_rows(store: ActivationStore) -> list[list[str]]:
    """A line per SAE, under FEATURES_HEADER; no lines for a store without statistics of features."""
    if not len(store.blocks) or not store.metadata.has_statistics:
        return []
    rows = []
    for sae in store.metadata.encoders:
        name = sae["features"].removeprefix("features.")
        statistics = store.feature_statistics(name)
        frequency = statistics.count / max(statistics.tokens, 1)
        shares = [(statistics.count == 0).sum(), (frequency > 0.01).sum(), (frequency > 0.1).sum()]
        explained = statistics.explained_variance
        cells = [f"{sae['width']:,}", f"{statistics.l0:.1f}", "-" if explained is None else f"{explained:.1%}"]
        rows.append([name, *cells, *(f"{int(share):,}" for share in shares)])
    return rows
