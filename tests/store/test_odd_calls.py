"""Calls of the library with odd arguments: only its own errors may come out."""

import inspect
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.core.errors import PipelineError
from pipeline.store import ActivationStore, Normalisation, TokenFilter, open_aligned
from tests.store.example_store import copy_store

Call = tuple[Callable[..., Any], Mapping[str, Any]]

WORDS = (
    *("embed", "blocks.1.resid_post", "blocks.1.hook_resid_post", "hook_mlp_in", "resid_post", "blocks.-1.resid_post"),
    *("blocks.99999999999999999999.resid_post", "stored", "float32", "int8", "M8[s]", "numpy", "jax", "torch"),
)
OBJECTS = (
    *(..., object, object(), int, print, NotImplemented, Exception("odd"), type, Path("embed"), np.float32),
    *(np.dtype("O"), np.dtype(ml_dtypes.bfloat16), np.arange(3), np.zeros((2, 2)), np.array(1), np.array([None])),
    *(np.True_, np.int64(1), np.uint64(2**64 - 1), np.float32(2.0), range(0), slice(None), slice("a"), slice(0, 9, 0)),
    *(TokenFilter(), TokenFilter(norms={"embed": (0, 5)}), Normalisation(0, 1), {"epoch": 1}, {"epoch": True}),
)


def odd_values() -> st.SearchStrategy[Any]:
    numbers = st.integers(-2, 3) | st.sampled_from([2**31, 2**63 - 1, 2**63, 10**30]) | st.floats() | st.just(1j)
    words = st.sampled_from(WORDS) | st.text(max_size=3)
    simple = st.none() | st.booleans() | numbers | words | st.binary(max_size=2) | st.sampled_from(OBJECTS)
    return simple | st.recursive(
        simple,
        lambda values: st.one_of(
            *(
                st.lists(values, max_size=3),
                st.lists(values, max_size=3).map(tuple),
                st.lists(values).map(iter),
            ),
            *(st.dictionaries(words, values, max_size=2), st.frozensets(numbers | words, max_size=2)),
        ),
        max_leaves=4,
    )


def calls(store: ActivationStore, path: str) -> dict[str, Call]:
    """Calls by name, each with valid arguments."""
    aligned = open_aligned([store, store])
    batches = {"keys": "embed", "batch_size": 3}
    return {
        "open": (ActivationStore.open, {"address": path}),
        "read": (store.read, {"key": "blocks.1.resid_post", "rows": [0, 1]}),
        "tokens_at": (store.tokens_at, {"rows": [0, 1], "positions": [1, 0]}),
        "documents": (store.documents, {}),
        "labels": (store.labels, {"column": "id"}),
        "read_tokens": (store.read_tokens, {"rows": 0}),
        "read_selected": (store.read_selected, {"rows": 0}),
        "read_outputs": (store.read_outputs, {"rows": 0}),
        "document": (store.document, {"id": 2}),
        "statistics": (store.statistics, {"key": "embed"}),
        "normalisation": (store.normalisation, {"keys": "embed"}),
        "sample": (store.sample, {"keys": "embed", "num_tokens": 9}),
        "feature": (store.feature, {"name": "embed", "feature": 0}),
        "feature_statistics": (store.feature_statistics, {"name": "embed"}),
        "batches": (store.batches, batches),
        "shuffled": (store.batches, {**batches, "shuffle": True, "epochs": None}),
        "ranks": (store.batches, {**batches, "world": 2}),
        "aligned": (aligned.batches, {"keys": ["embed", "embed"], "batch_size": 3}),
        "open_aligned": (open_aligned, {"stores": [path, path]}),
        "TokenFilter": (TokenFilter, {}),
    }


@pytest.fixture(scope="module")
def example_calls(tmp_path_factory) -> dict[str, Call]:
    path = str(tmp_path_factory.mktemp("calls"))
    copy_store(path)
    return calls(ActivationStore.open(path), path)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_odd_arguments_raise_only_the_librarys_own_errors(example_calls, data):
    function, arguments = example_calls[data.draw(st.sampled_from(sorted(example_calls)))]
    names = st.sampled_from(list(inspect.signature(function).parameters))
    odd = {name: data.draw(odd_values(), name) for name in data.draw(st.lists(names, min_size=1, max_size=2))}
    with suppress(PipelineError):
        result = function(**{**arguments, **odd})
        if hasattr(result, "__next__"):
            list(itertools.islice(result, 3))
            result.close()
