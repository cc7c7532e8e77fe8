"""Checks of `pipeline.verify` on arrays of SAE features."""

import numpy as np
import pytest

from pipeline.store.check.block_checks import check_features

VALID = np.array([[1, 1, 0], [1, 0, 0]], bool)


def sound() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Index and value [R, S, k] and n_active [R, S]: one token has more features than slots, one has fewer."""
    index, value = np.full((2, 3, 3), -1, np.int32), np.zeros((2, 3, 3), np.float32)
    index[0, 0], value[0, 0] = (7, 0, 9), (3, 2, 2)
    index[0, 1], value[0, 1] = (4, -1, -1), (1, 0, 0)
    n_active = np.array([[5, 1, 0], [0, 0, 0]], np.int32)
    return index, value, n_active


WRONG = {
    "sound": ([], None),
    "too large": ([(0, (0, 0, 0), 10)], "an index outside -1 to 9"),
    "too small": ([(0, (0, 0, 0), -2)], "an index outside -1 to 9"),
    "no value": ([(1, (0, 1, 0), 0)], "a feature whose value is not a finite number above 0"),
    "not a number": ([(1, (0, 1, 0), np.nan)], "a feature whose value is not a finite number above 0"),
    "value of none": ([(1, (0, 1, 1), 0.5)], "a value in an empty slot"),
    "padding": ([(0, (1, 1, 0), 3), (1, (1, 1, 0), 1), (2, (1, 1), 1)], "a feature where there is no token"),
    "gap": ([(0, (0, 0, 1), -1), (1, (0, 0, 1), 0)], "an empty slot before a feature"),
    "rising": ([(1, (0, 0, 2), 2.5)], "values that are not in descending order"),
    "twice": ([(0, (0, 0, 2), 0)], "the same feature twice"),
    "too many": ([(2, (0, 1), 2)], "a number of features that contradicts n_active"),
    "too few": ([(2, (0, 0), 2)], "a number of features that contradicts n_active"),
    "count of none": ([(2, (1, 2), 1)], "a number of features that contradicts n_active"),
}


@pytest.mark.parametrize(("edits", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_features_are_reported(edits, message) -> None:
    arrays = sound()
    for array, place, value in edits:
        arrays[array][place] = value
    problems = list(check_features(*arrays, VALID, width=10))
    assert bool(problems) == (message is not None)
    assert message is None or any(problem.endswith(message) for problem in problems), problems
