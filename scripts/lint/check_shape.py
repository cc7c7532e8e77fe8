"""Checks the sizes of the repository's parts: python scripts/lint/check_shape.py. Exits with 1 if a limit is exceeded.

Limits: lines of a room (pyproject.toml, [tool.house.lines]), modules in a package, lines of a function, public methods
of a class. Circular imports are not allowed either, including imports inside functions. Ruff limits parameters.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pipeline"
MAX_COMMANDS = 10  # files directly in `pipeline`
MAX_MODULES = 15  # per package
MAX_LINES = 60  # per function
MAX_METHODS = 15  # public methods per class
EXCEPTIONS: Mapping[str, str] = {  # name -> reason
    "pipeline.models.families": "a file per family; they do not depend on each other's size",
    "pipeline.store.read.batches:batches": "its arguments are a reader's options; notebooks complete and explain them",
    "pipeline.library.stream:batches": "likewise",
}


def main() -> int:
    files = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    problems = {
        **crowded_packages(),
        **{name: what for module, tree in trees.items() for name, what in large_parts(module, tree)},
    }
    lines = [f"{name} {what}" for name, what in problems.items() if name not in EXCEPTIONS]
    lines += [f"{name} does not need an exception" for name in EXCEPTIONS.keys() - problems.keys()]
    if circle := cycle(import_graph(trees)):
        lines.append(f"these modules import each other: {', '.join(circle)}")
    lines += large_rooms(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["house"]["lines"])
    print("\n".join(lines) or f"{len(files)} modules: all within the limits")
    return bool(lines)


def large_rooms(budgets: Mapping[str, int]) -> Iterator[str]:
    """Rooms with more lines than their budget, and rooms without one. A room is a folder with all that is below it;
    `pipeline` has only the files directly in it, since its packages are rooms."""
    folders = [PACKAGE, *(path.parent for path in PACKAGE.glob("*/__init__.py")), ROOT / "scripts", ROOT / "tests"]
    rooms = {str(folder.relative_to(ROOT)): folder for folder in folders}
    for name in sorted(rooms.keys() ^ budgets.keys()):
        yield f"pyproject.toml, [tool.house.lines]: {name} has no budget, or is no room. Add or remove its line."
    for name in sorted(rooms.keys() & budgets.keys()):
        files = rooms[name].glob("*.py") if rooms[name] == PACKAGE else rooms[name].rglob("*.py")
        num_lines = sum(len(file.read_text().splitlines()) for file in files)
        if num_lines > budgets[name]:
            yield (
                f"{name} has {num_lines:,} lines, its budget is {budgets[name]:,}. Remove as much as you add, or raise "
                "its line in pyproject.toml, [tool.house.lines]: growth is a decision that the commit names."
            )


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def crowded_packages() -> dict[str, str]:
    """Packages with too many modules: name -> problem."""
    packages = {PACKAGE: MAX_COMMANDS} | {path.parent: MAX_MODULES for path in PACKAGE.glob("*/**/__init__.py")}
    counts = {folder: len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) for folder in packages}
    return {
        module_name(folder / "__init__.py"): f"has {counts[folder]} modules, at most {limit} are allowed"
        for folder, limit in packages.items()
        if counts[folder] > limit
    }


def large_parts(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Functions and classes that exceed a limit: name and problem."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_LINES:
                yield f"{module}:{node.name}", f"has {lines} lines, at most {MAX_LINES} are allowed"
        elif isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            public = [method for method in methods if not method.name.startswith("_")]
            if len(public) > MAX_METHODS:
                yield f"{module}:{node.name}", f"has {len(public)} public methods, at most {MAX_METHODS} are allowed"


def import_graph(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """The modules that each module imports, including imports inside functions."""
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        imported = graph[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names if alias.name in trees}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    within = f"{node.module}.{alias.name}"
                    imported |= {within if within in trees else node.module} & trees.keys()
        imported.discard(name)
    return graph


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


if __name__ == "__main__":
    sys.exit(main())
