"""Damaged inputs end in blocks or in one error with exit code 2; see `fuzz_inputs`."""

import fuzz_inputs
import pytest


def assert_sound(count: int, seed: int) -> None:
    cases = list(fuzz_inputs.run(count, seed, list(fuzz_inputs.SEEDS)))
    assert not [case for case in cases if case.is_wrong]
    assert len(cases) == count
    assert {case.code for case in cases} == {None, 2}


def test_sampled_damage_ends_in_blocks_or_one_error():
    assert_sound(4 * len(fuzz_inputs.SEEDS), seed=0)


@pytest.mark.slow
def test_thousands_of_damaged_inputs_end_in_blocks_or_one_error():
    """Takes four minutes, since few cases reach some parts of each kind."""
    assert_sound(5000, seed=1)
