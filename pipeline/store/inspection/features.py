"""What some features of an SAE fire on: the values of each, and the contexts of its strongest firings.

Shapes: F features of the SAE, n firings of a feature, T positions of a row, c tokens of a context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32, Int64

from pipeline.core.errors import ConfigError, StoreInvalid
from pipeline.store import ActivationStore
from pipeline.store.format.keys import features_name
from pipeline.store.io.failures import VERIFY_REMEDY
from pipeline.store.read.stored_statistics import FeatureStatistics

TOKENS_BEFORE, TOKENS_AFTER = 28, 12  # in a context, around the strongest firing
# If a feature fires more than MAX_FIRINGS times, only its TOP_PER_CONTEXT strongest firings per context are read.
MAX_FIRINGS, TOP_PER_CONTEXT = 5_000_000, 64
EXTREMES = 4  # how many of the most frequent, and of the least frequent, features are shown by default

SUMMARY_HEADER = ["features of", "number", "L0", "explained", "never", "in > 1 %", "in > 10 %"]


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
    views = (_view(store, name, feature, int(statistics.count[feature]), contexts) for feature in chosen)
    return SAEView(name, statistics, tuple(views))


def most_and_least_frequent(count: Int64[np.ndarray, " F"], num: int) -> tuple[int, ...]:
    """The `num` features that fire most often, and the `num` that fire least often but at least once, in descending
    order of count."""
    order = np.argsort(-count, kind="stable")
    order = order[count[order] > 0]
    return tuple(order.tolist() if len(order) <= 2 * num else [*order[:num].tolist(), *order[-num:].tolist()])


def _view(store: ActivationStore, name: str, feature: int, count: int, num_contexts: int) -> FeatureView:
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


def summary_rows(store: ActivationStore) -> list[list[str]]:
    """A line per SAE, under SUMMARY_HEADER; no lines for a store without statistics of features."""
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
