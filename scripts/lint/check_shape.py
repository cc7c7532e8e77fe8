"""Keeps the package readable: python scripts/lint/check_shape.py counts, and ends with 1 where a limit is passed.

Limits: modules beside each other, lines of a function, public methods of a class, parameters of a function; and no two
modules import each other, whatever the way round and wherever the import stands.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "pipeline"
MAX_COMMANDS = 10  # files directly in the package
MAX_MODULES = 15  # of a room
MAX_LINES = 60  # of a function
MAX_METHODS = 15  # public ones of a class
MAX_PARAMETERS = 8  # of a function, without self
EXCEPTIONS: Mapping[str, str] = {  # by name, with the reason
    "pipeline.models.families": "a file for each family and its relatives; none grows with the others",
    "pipeline.store.read.reader:ActivationStore": "all that one asks of a store; each method is one question",
}


def main() -> int:
    files = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    problems = {
        **crowded_rooms(),
        **{name: what for module, tree in trees.items() for name, what in large_parts(module, tree)},
    }
    lines = [f"{name} {what}" for name, what in problems.items() if name not in EXCEPTIONS]
    lines += [f"{name} is an exception that nothing needs" for name in EXCEPTIONS.keys() - problems.keys()]
    lines += [f"these modules import each other: {', '.join(circle)}" for circle in circles(import_graph(trees))]
    print("\n".join(lines) or f"{len(files)} modules: all within the limits")
    return bool(lines)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def crowded_rooms() -> dict[str, str]:
    """Rooms with more modules than their limit: what is wrong, by name."""
    rooms = {PACKAGE: MAX_COMMANDS} | {path.parent: MAX_MODULES for path in PACKAGE.glob("*/**/__init__.py")}
    counts = {room: len([path for path in room.glob("*.py") if path.name != "__init__.py"]) for room in rooms}
    return {
        module_name(room / "__init__.py"): f"has {counts[room]} modules, at most {limit} are allowed"
        for room, limit in rooms.items()
        if counts[room] > limit
    }


def large_parts(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Functions and classes beyond the limits: their names, and what is wrong."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines, parameters = node.end_lineno - node.lineno + 1, num_parameters(node.args)
            if lines > MAX_LINES or parameters > MAX_PARAMETERS:
                limits = f"at most {MAX_LINES} and {MAX_PARAMETERS} are allowed"
                yield f"{module}:{node.name}", f"has {lines} lines and {parameters} parameters, {limits}"
        elif isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            public = [method for method in methods if not method.name.startswith("_")]
            if len(public) > MAX_METHODS:
                yield f"{module}:{node.name}", f"has {len(public)} public methods, at most {MAX_METHODS} are allowed"


def num_parameters(arguments: ast.arguments) -> int:
    """Without self."""
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len(named) - (bool(named) and named[0].arg in ("self", "cls"))


def import_graph(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Which modules each module imports, also inside functions."""
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


def circles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """The strongly connected components of more than one module, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                yield from visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            component = stack[place:]
            del stack[place:]
            if len(component) > 1:
                yield sorted(component)

    for name in graph:
        if name not in index:
            yield from visit(name)


if __name__ == "__main__":
    sys.exit(main())
