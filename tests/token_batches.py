"""Compares batches of tokens byte by byte, from any reader."""

from collections.abc import Iterable

import numpy as np

from pipeline.store import Batch


def arrays(batch: Batch) -> dict[str, np.ndarray]:
    """Every array of a batch."""
    activations = batch.activations if isinstance(batch.activations, dict) else {"activations": batch.activations}
    features = {
        f"{name}.{part}": getattr(values, part)
        for name, values in batch.features.items()
        for part in ("index", "value", "n_active")
    }
    sides = {name: getattr(batch, name) for name in ("tokens", "segments", "positions", "documents")}
    return {name: np.asarray(values) for name, values in (sides | activations | batch.outputs | features).items()}


def tokens_of(batches: Iterable[Batch]) -> list[bytes]:
    """The bytes of each token from all arrays, sorted."""
    rows = []
    for batch in batches:
        values = sorted(arrays(batch).items())
        assert all(len(array) == len(batch.tokens) for _, array in values)
        rows += list(map(b"".join, zip(*([row.tobytes() for row in array] for _, array in values), strict=True)))
    return sorted(rows)


def assert_same(left: Batch, right: Batch) -> None:
    assert {name: array.tobytes() for name, array in arrays(left).items()} == {
        name: array.tobytes() for name, array in arrays(right).items()
    }


def assert_all_same(left: Iterable[Batch], right: Iterable[Batch]) -> None:
    for one, other in zip(left, right, strict=True):
        assert_same(one, other)
