from scripts.bench.attention_blocks import table
from tests.jobs import ROOT


def test_the_table_in_the_documentation_is_what_the_command_prints() -> None:
    """Of the shorter rows: the longest take seconds to pack."""
    text = (ROOT / "docs" / "performance.md").read_text()
    assert "`python -m scripts.bench.attention_blocks`" in text
    printed = table((2048, 4096, 8192))
    assert len(printed) == 4
    assert [line for line in printed if line not in text.splitlines()] == []
