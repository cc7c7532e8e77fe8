"""Calls of the library with odd arguments: only its own errors may come out.

PYTHONPATH=. python -m tests.store.call_fuzzer 2000
"""

import inspect
import itertools
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import PipelineError
from pipeline.store import ActivationStore, Normalisation, TokenFilter, open_aligned
from tests.store.example_store import copy_store

Call = tuple[Callable[..., Any], Mapping[str, Any]]


def odd_values() -> list[Any]:
    """New ones at every call, since some are iterators."""
    return [
        *(None, True, False, np.True_, 0, 1, 2, -1, -7, 10**6, 2**31, 2**63 - 1, 2**63, 10**30, -(10**30)),
        *(0.0, 2.0, -0.5, 1e300, float("nan"), float("inf"), 1j, np.int64(1), np.uint64(2**64 - 1), np.float32(2.0)),
        *(
            "",
            "embed",
            "blocks.1.resid_post",
            "blocks.1.hook_resid_post",
            "hook_mlp_in",
            "resid_post",
            "no",
            "é\x00\ud800",
        ),
        *("blocks.99999999999999999999.resid_post", "blocks.-1.resid_post", b"embed", Path("embed"), "d0", "stored"),
        *([], [[]], [None], ["embed"], ["embed", "embed"], [1, 2], [True], [-1], [2**63], [10**30], [0.5], ["a", 1]),
        *(
            (),
            (1,),
            (1, "resid_post"),
            (True, "resid_post"),
            (1.0, "resid_post"),
            (None, "embed"),
            (1, 2, 3),
            ("embed",),
        ),
        *(
            {},
            {1: 2},
            {"epoch": 1},
            {"epoch": -1},
            {"epoch": True},
            {"epoch": 10**30},
            {"embed": (0, 1)},
            {"embed": None},
        ),
        *(
            set(),
            {"embed"},
            frozenset([1]),
            range(2),
            range(0),
            slice(None),
            slice(0, 3),
            slice("a"),
            slice(0, 9, 0),
            ...,
        ),
        *(
            object,
            object(),
            int,
            np.float32,
            np.dtype("O"),
            np.dtype("bfloat16"),
            "float32",
            "int8",
            "O",
            "f4",
            "M8[s]",
        ),
        *(np.arange(3), np.zeros((2, 2)), np.array(1), np.array(True), np.array(["embed"]), np.array([None]), np.nan),
        *(
            (i for i in (0, 1)),
            iter(["embed"]),
            map(str, [1]),
            lambda: 0,
            print,
            NotImplemented,
            Exception("odd"),
            type,
        ),
        *("numpy", "jax", "torch", "cupy", TokenFilter(), TokenFilter(norms={"embed": (0, 5)}), Normalisation(0, 1)),
    ]


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
        "item": (store.__getitem__, {"key": "embed"}),
        "rows of item": (store["embed"].__getitem__, {"index": 0}),
        "batches": (store.batches, batches),
        "shuffled": (store.batches, {**batches, "shuffle": True, "epochs": None}),
        "ranks": (store.batches, {**batches, "world": 2}),
        "aligned": (aligned.batches, {"keys": ["embed", "embed"], "batch_size": 3}),
        "open_aligned": (open_aligned, {"stores": [path, path]}),
        "TokenFilter": (TokenFilter, {}),
    }


def surprises(fuzzed: Mapping[str, Call], num_cases: int, seed: int = 0) -> list[str]:
    """The calls that raised another error than the library's own, with its traceback."""
    rng, found = random.Random(seed), []
    for case in range(num_cases):
        name, (call, arguments) = rng.choice(list(fuzzed.items()))
        parameters = list(inspect.signature(call).parameters)
        odd = {rng.choice(parameters): rng.choice(odd_values()) for _ in range(rng.choice([1, 1, 2]))}
        try:
            result = call(**{**arguments, **odd})
            if hasattr(result, "__next__"):
                list(itertools.islice(result, 3))
                result.close()
        except PipelineError:
            continue
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            found.append(f"case {case}: {name}(**{odd!r}): {''.join(traceback.format_exception(error)[-3:])}")
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        copy_store(folder)
        found = surprises(calls(ActivationStore.open(folder), folder), int(sys.argv[1]))
    print("\n".join(found[:40]), f"\n{len(found)} surprises in {sys.argv[1]} calls")
    sys.exit(bool(found))
