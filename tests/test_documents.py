"""What the documents name exists, and the program has the messages that they explain."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.jobs import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
MESSAGES = ROOT / "docs" / "troubleshooting.md"
# Paths of the repository in the documents begin with one of these.
FOLDERS = ("pipeline", "tests", "scripts", "launch", "configs", "docs")


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes from a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document):
    """Linked files and headings, paths of the repository, modules and make targets."""
    text, broken = document.read_text(), []
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    named = re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w/?)", text)
    to_copy = {str(file.relative_to(ROOT).with_suffix("")) for file in (ROOT / "launch").glob("*.example")}
    broken += [path for path in named if not (ROOT / path).exists() and path not in to_copy]
    modules = {name.replace(".", "/") for name in re.findall(r"\bpipeline(?:\.[a-z_]+\b(?!\())+", text)}
    broken += [name for name in modules if not ((ROOT / name).is_dir() or (ROOT / f"{name}.py").exists())]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    broken += set(re.findall(r"(?:`|^    )make ([a-z-]*[a-z])\b", text, flags=re.MULTILINE)) - targets
    assert broken == []


def test_the_program_has_the_explained_messages():
    texts = program_texts()
    quoted = list(explained_messages())
    assert len(quoted) >= 15
    assert [message for message in quoted if not any(is_in(message, text) for text in texts)] == []


def explained_messages() -> Iterator[str]:
    """The first cells of the table under "By message"."""
    section = MESSAGES.read_text().split("\n## By message\n")[1].split("\n## ")[0]
    yield from re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)


def is_in(message: str, text: str) -> bool:
    """Whether a text contains the message. Values are NUL in the text and `...` in the message."""
    return re.search(".*".join(map(re.escape, message.split("..."))), text, flags=re.DOTALL) is not None


@cache
def program_texts() -> list[str]:
    """Every string of the package, without its values."""
    found = []
    for file in (ROOT / "pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values))
    return found
