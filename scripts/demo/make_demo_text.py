"""Writes the English text that comes with every CPython as parquet shards in FineWeb's schema.

    python scripts/demo/make_demo_text.py --out DIR

Three megabytes without a download: the language reference's help topics, the docstrings of the standard library (read
with `ast`; nothing is imported or run), and its text files. The same Python version gives the same documents with the
same ids. `token_count` is the number of words.
"""

import argparse
import ast
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq

MIN_CHARACTERS = 120  # skips a heading with a single line below it
ROWS_PER_GROUP = 100
# Tests, generated tables, and additions to the standard library by a distribution or the user.
SKIPPED_FOLDERS = {"dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Text:
    """One document. `name` is a topic, or the dotted path of a class or module; `file` is relative to the library."""

    name: str
    file: str
    text: str

    def row(self) -> dict[str, str | int | float]:
        """The document as a row in FineWeb's schema."""
        return {
            "text": self.text,
            "id": f"<python:{self.name}>",
            "dump": f"CPython-{platform.python_version()}",
            "url": f"python://stdlib/{self.file}#{self.name}",
            "date": "",
            "file_path": self.file,
            "language": "en",
            "language_score": 1.0,
            "token_count": len(self.text.split()),
        }


def documents() -> list[Text]:
    """All documents from this Python, sorted by name. Names are unique."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [Text(f"topics.{name}", "pydoc_data/topics.py", text.strip()) for name, text in topics.items()]
    for path in sorted(library.rglob("*")):
        file = path.relative_to(library)
        if SKIPPED_FOLDERS & set(file.parts) or file.parts[0].startswith("config-") or not path.is_file():
            continue
        if path.suffix == ".py":
            texts += module_texts(path.read_bytes(), file)
        elif path.suffix in (".txt", ".rst"):
            texts.append(Text(file.as_posix(), file.as_posix(), path.read_text("utf-8", errors="replace").strip()))
    return sorted(text for text in texts if len(text.text) >= MIN_CHARACTERS)


def module_texts(source: bytes, file: Path) -> Iterator[Text]:
    """One document per top-level class, and one for the rest of the module."""
    module = ".".join(part for part in file.with_suffix("").parts if part != "__init__")
    tree = ast.parse(source)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}  # the last of a name wins
    for name, node in classes.items():
        yield Text(f"{module}.{name}", file.as_posix(), "\n\n".join(definitions(node, "")))
    rest = [text for node in tree.body if not isinstance(node, ast.ClassDef) for text in definitions(node, "")]
    yield Text(module, file.as_posix(), "\n\n".join([ast.get_docstring(tree) or "", *rest]).strip())


def definitions(node: ast.AST, prefix: str) -> Iterator[str]:
    """Heading and docstring of each documented class and function in `node`, including `node`."""
    if isinstance(node, Definition):
        name = prefix + node.name
        if docstring := ast.get_docstring(node):
            bases = node.bases if isinstance(node, ast.ClassDef) else [node.args]
            yield f"{name}({', '.join(map(ast.unparse, bases))})\n\n{docstring}"
        prefix = name + "."
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from definitions(child, prefix)


def write_shards(texts: list[Text], out: Path, num_shards: int = 6) -> None:
    """Writes text i to shard i mod `num_shards`, so that all shards have similar sizes and contents."""
    out.mkdir(parents=True, exist_ok=True)
    for shard in range(num_shards):
        table = pa.Table.from_pylist([text.row() for text in texts[shard::num_shards]])
        pq.write_table(table, out / f"{shard:03}_00000.parquet", compression="zstd", row_group_size=ROWS_PER_GROUP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    args = parser.parse_args()
    texts = documents()
    write_shards(texts, args.out)
    num_bytes = sum(len(text.text.encode()) for text in texts)
    print(f"{len(texts)} documents, {num_bytes / 1e6:.1f} MB of text in {args.out}")


if __name__ == "__main__":
    main()
