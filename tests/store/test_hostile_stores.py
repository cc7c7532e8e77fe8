"""Crafted stores raise a PipelineError or read as what they are: no traceback, no link followed, no full memory."""

import pytest

from tests.store.hostile_stores import cases, run_cases

NAMES = [case.name for case in cases()]
EVERY = 24  # of the cases, in each run of the tests


def assert_none_fails(names: list[str]) -> None:
    failures = [result for result in run_cases(names) if result.failure]
    assert not failures, "\n".join(f"{result.name}: {result.failure}" for result in failures)


def test_sampled_cases():
    assert_none_fails([name for name in NAMES if "bombs" not in name and "sparse" not in name][::EVERY])


@pytest.mark.slow
def test_all_cases():
    assert len(set(NAMES)) == len(NAMES)
    assert_none_fails(NAMES)
