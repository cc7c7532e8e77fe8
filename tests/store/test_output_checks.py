"""Checks of `pipeline.verify` on the arrays of `capture.outputs` and on the errors of SAEs."""

import math

import numpy as np
import pytest

from pipeline.store.check.block_checks import check_output

VALID = np.array([[1, 1, 1], [1, 0, 0]], bool)
SOUND = {
    "loss": np.array([[0.5, -1e-6, np.nan], [9, 0, 0]], np.float32),
    "entropy": np.array([[0, math.log(97) + 1e-4, 1], [2, 0, 0]], np.float32),
    "top_logprobs": np.array([[[-0.5, -1], [0, -90], [-1, -1]], [[1e-6, -2], [0, 0], [0, 0]]], np.float32),
    "top_ids": np.array([[[0, 96], [5, 4], [4, 5]], [[1, 2], [0, 0], [0, 0]]], np.int32),
    "squared_error": np.array([[0, 1e9, 2], [3, 0, 0]], np.float32),
    "cosine": np.array([[-1, 1 + 1e-5, 0], [0.5, 0, 0]], np.float32),
}
WRONG = [  # array, place, value, whether values may be non-finite, message
    *((name, (), None, allowed, None) for name in SOUND for allowed in (False, True)),
    *((name, (1, 1), 1, True, "is not zero in padding") for name in SOUND),
    *((name, (0, 0), np.inf, False, "1 values are not within") for name in ("loss", "entropy", "squared_error")),
    *((name, (0, 0), np.nan, False, "1 values are not within") for name in ("entropy", "squared_error", "cosine")),
    *((name, (0, 0), np.inf, True, None) for name in ("loss", "entropy", "squared_error")),
    *((name, (0, 1), -0.1, True, "1 values are not within 0 to") for name in ("loss", "entropy", "squared_error")),
    ("entropy", (0, 1), 4.6, True, "1 values are not within 0 to 4.57471"),
    ("cosine", (0, 1), -1.1, True, "1 values are not within -1 to 1"),
    ("top_logprobs", (0, 2, 0), 0.1, True, "1 values are not within"),
    ("top_logprobs", (0, 2, 1), -np.inf, False, "1 values are not within"),
    ("top_logprobs", (0, 2, 1), -np.inf, True, None),
    ("top_logprobs", (0, 0, 1), -0.1, True, "not in descending order"),
    ("top_ids", (0, 0, 0), -1, True, "1 values are not within 0 to 96"),
    ("top_ids", (0, 0, 0), 97, True, "1 values are not within 0 to 96"),
]


@pytest.mark.parametrize(("name", "place", "value", "may_be_not_finite", "message"), WRONG)
def test_wrong_outputs_are_reported(name, place, value, may_be_not_finite, message):
    values = SOUND[name].copy()
    if place:
        values[place] = value
    found = list(check_output(name, values, VALID, 97, may_be_not_finite))
    assert bool(found) == (message is not None), found
    assert message is None or any(message in what for what in found), found


def test_without_a_vocabulary_only_signs_are_checked():
    for bad, num_found in ((10**6, 0), (-1, 1)):
        assert (
            len(list(check_output("top_ids", np.full((2, 3, 4), bad, np.int32), np.ones((2, 3), bool), None, False)))
            == num_found
        )
