"""Damaged inputs end in the blocks or in one error of exit code 2. `fuzz_inputs` says how; here are samples."""

import fuzz_inputs
import pytest


def assert_sound(count: int, seed: int) -> None:
    cases = list(fuzz_inputs.run(count, seed, list(fuzz_inputs.SEEDS)))
    assert not [case for case in cases if case.is_wrong]
    assert len(cases) == count
    assert {case.code for case in cases} == {None, 2}


def test_a_sample_of_damaged_inputs():
    assert_sound(4 * len(fuzz_inputs.SEEDS), seed=0)


@pytest.mark.slow
def test_many_damaged_inputs():
    """Four minutes: each kind has corners that few cases reach."""
    assert_sound(5000, seed=1)
