"""Checks the imports: python scripts/lint/check_imports.py. Exits with 1 if one is wrong.

Every name imported from the package exists, and no test needs a library that is not installed on every Python.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFERENCES = ("torch", "transformers", "sentence_transformers", "safetensors.torch")  # see the extra `test`


def main() -> int:
    paths = [path for folder in ("pipeline", "scripts", "tests", "launch") for path in (ROOT / folder).rglob("*.py")]
    lines = [line for path in sorted(paths) for line in missing_names(path)]
    lines += [line for path in sorted((ROOT / "tests").rglob("test_*.py")) for line in unguarded(path)]
    print("\n".join(lines) or f"{len(paths)} files: every imported name of the package exists")
    return bool(lines)


def missing_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pipeline":
            for alias in node.names:
                if not exists(node.module, alias.name):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {alias.name}"


def unguarded(path: Path) -> Iterator[str]:
    """Imports at the top of a test file that fail where the references are not installed."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for module in modules:
                if f"{module}.".startswith(tuple(f"{name}." for name in REFERENCES)):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: use pytest.importorskip({module!r})"


def exists(module: str, name: str) -> bool:
    """Whether a module or package has a name, or a module of that name."""
    path = ROOT.joinpath(*module.split("."))
    if (path / name).with_suffix(".py").exists() or (path / name / "__init__.py").exists():
        return True
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return source.exists() and name in top_level_names(ast.parse(source.read_text()))


def top_level_names(tree: ast.Module) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {getattr(node, "name", "") for node in tree.body}
    for_types = [part for node in tree.body if isinstance(node, ast.If) for part in node.body]  # if TYPE_CHECKING
    imports = [node for node in (*tree.body, *for_types) if isinstance(node, ast.Import | ast.ImportFrom)]
    return names | {alias.asname or alias.name for node in imports for alias in node.names}


if __name__ == "__main__":
    sys.exit(main())
