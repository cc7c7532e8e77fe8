"""After any damage to a store, `verify_store` reports it or nothing has changed, and no reader returns other values.
Every run of the tests tries a few cases, slow runs thousands. `damage_fuzzer` specifies the right outcomes."""

from collections import Counter

import pytest

from tests.store.damage import OPERATORS
from tests.store.damage_fuzzer import Case, Outcome, run_cases
from tests.store.damage_stores import KINDS, SAMPLED_KINDS, make_specimen

pytestmark = pytest.mark.heavy
SAMPLED_CASES, CASES = 20, 120  # per kind, the latter in slow runs


def assert_none_fails(cases: list[Case]) -> None:
    failures = [case for case in cases if case.outcome.is_failure]
    assert not failures, "\n".join(map(str, failures))
    assert all(case.outcome is Outcome.harmless for case in cases if case.operator == "none"), "a false alarm"


def test_sampled_damage_is_reported_or_harmless(tmp_path):
    specimens = [make_specimen(kind, tmp_path) for kind in SAMPLED_KINDS]
    assert_none_fails(list(run_cases(specimens, range(SAMPLED_CASES))))


@pytest.mark.slow
def test_damage_to_stores_of_every_kind_is_reported_or_harmless(tmp_path, capsys):
    """Uses every operator on every kind of store that it suits, and prints the counts of outcomes."""
    cases = list(run_cases([make_specimen(kind, tmp_path) for kind in KINDS], range(CASES)))
    with capsys.disabled():
        print("", *sorted(Counter(f"{case.operator} {case.outcome}" for case in cases).items()), sep="\n")
    assert_none_fails(cases)
    assert Counter(case.kind for case in cases) == {kind: CASES + 1 for kind in KINDS}
    assert {case.operator for case in cases} == {*OPERATORS, "none"}
