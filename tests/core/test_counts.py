import pytest

from pipeline.core.counts import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 blocks"), (1, "1 block"), (2, "2 blocks"), (1_000_000, "1,000,000 blocks")]
)
def test_a_noun_is_in_the_plural_unless_its_number_is_one(number, text):
    assert counted(number, "block") == text
