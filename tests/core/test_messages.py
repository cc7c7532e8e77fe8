"""Every error that a user can mend says what is expected, what is allowed or what to do."""

import ast
import re

from pipeline.core.errors import ArgumentError, CheckpointError, ConfigError, InputError, StoreMismatch
from pipeline.core.messages import counted, printable, shown
from tests.jobs import ROOT

KINDS = {kind.__name__ for kind in (ArgumentError, CheckpointError, ConfigError, InputError, StoreMismatch)}
# An expectation, or a second sentence or clause. A value (NUL) may be a sentence itself.
REMEDY = re.compile(r"expected|needs|takes|[:;] |[.)\0] [A-Z]|, but |[.,] ?\0$|\0 \0")


def literal(node: ast.expr) -> str | None:
    """The text of a message, with NUL for each value; None if it is not written where it is raised."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return None


def test_every_message_has_a_remedy():
    num_messages, without = 0, []
    for file in sorted((ROOT / "pipeline").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            if getattr(node.exc.func, "id", None) in KINDS and (text := literal(node.exc.args[0])) is not None:
                num_messages += 1
                if not REMEDY.search(text):
                    without.append(f"{file.relative_to(ROOT)}:{node.lineno}: {text.replace(chr(0), '...')}")
    assert num_messages > 150
    assert not without, "\n".join(without)


def test_values_and_counts_are_shown_in_short_and_printable_text():
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert [counted(number, "block") for number in (0, 1, 2000)] == ["0 blocks", "1 block", "2,000 blocks"]
    assert (shown("a"), shown([1, None])) == ("'a'", "[1, None]")
    assert len(shown("x" * 5000)) <= 200
    assert "Broken" in shown(Broken())
    assert printable("a\x1b[31m\u202e\n") == "a\\x1b[31m\\u202e\n"
