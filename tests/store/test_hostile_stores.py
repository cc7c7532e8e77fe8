"""Crafted stores raise a PipelineError or read as what they are: no traceback, no full memory."""

import pytest

from tests.store.hostile_stores import cases, run_cases

NAMES = [case.name for case in cases()]


def assert_none_fails(names: list[str], processes: int) -> None:
    failures = [result for result in run_cases(names, processes) if result.failure]
    assert not failures, "\n".join(f"{result.name}: {result.failure}" for result in failures)


def test_one_case_of_each_class():
    of_class = {name.split()[0]: name for name in reversed(NAMES)}  # its first
    assert_none_fails([name for name in of_class.values() if "bombs" not in name and "sparse" not in name], 1)


@pytest.mark.slow
def test_all_cases():
    assert len(set(NAMES)) == len(NAMES)
    assert_none_fails(NAMES, 2)
