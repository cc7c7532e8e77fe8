"""Checks of `pipeline.verify` on the arrays of `capture.outputs`."""

import numpy as np
import pytest

from pipeline.store.check.block_checks import check_ids, check_output, next_in_window

SEGMENTS = np.array([[1, 1, 2, 2, 2, 0], [1, 2, 3, 3, 0, 0]], np.int32)
HAS_NEXT = np.array([[1, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]], bool)


def test_the_last_token_of_each_window_has_no_next_one():
    np.testing.assert_array_equal(next_in_window(SEGMENTS), HAS_NEXT)


def sound() -> np.ndarray:
    """Values [R, S, k] in descending order, NaN for tokens without a next one."""
    values = np.broadcast_to(np.array([-0.5, -1.0, -1.0], np.float32), (*SEGMENTS.shape, 3)).copy()
    values[SEGMENTS == 0] = 0
    values[(SEGMENTS > 0) & ~HAS_NEXT] = np.nan
    return values


WRONG = {
    "sound": ((), None, False, None),
    "not finite": ((0, 2, 2), -np.inf, False, "1 tokens have non-finite values"),
    "not finite, which is allowed": ((0, 2, 2), -np.inf, True, None),
    "a loss of the next document's token": ((0, 1), 0.5, True, "is not NaN for every token without a next token"),
    "ascending": ((1, 2, 2), -0.1, True, "not in descending order"),
}


@pytest.mark.parametrize(("place", "value", "may_be_not_finite", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_outputs_are_reported(place, value, may_be_not_finite, message):
    values = sound()
    if place:
        values[place] = value
    found = list(check_output(values, SEGMENTS > 0, HAS_NEXT, may_be_not_finite))
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


@pytest.mark.parametrize(("bad", "num_bad"), [(0, 0), (96, 0), (97, 1), (-1, 1)])
def test_token_ids_outside_the_vocabulary_are_reported(bad, num_bad):
    ids = np.full((2, 3, 4), 5, np.int32)
    ids[1, 2, 3] = bad
    assert [what.split()[0] for what in check_ids(ids, 97)] == ["1"] * num_bad
    assert list(check_ids(ids, None)) == (["1 ids are outside the vocabulary of None"] if bad < 0 else [])
