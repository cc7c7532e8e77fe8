from scripts.bench.attention_blocks import table
from tests.jobs import ROOT


def test_the_table_in_the_documentation_matches_the_command() -> None:
    """Only for shorter rows, since the longest take seconds to pack."""
    text = (ROOT / "docs" / "performance.md").read_text()
    assert "`python -m scripts.bench.attention_blocks`" in text
    printed = table((2048, 4096, 8192))
    assert len(printed) == 4
    assert [line for line in printed if line not in text.splitlines()] == []
