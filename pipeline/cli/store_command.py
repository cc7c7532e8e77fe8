"""Shared by the commands that work on a store: parses the settings, runs, and maps errors to exit codes."""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from pipeline.cli.settings import UsageError, parse, settings_help, usage
from pipeline.core.errors import EXIT_OK, PipelineError

S = TypeVar("S")
_HELP = {"--help", "-h"}


def run_command(name: str, doc: str, settings: type[S], task: Callable[[S], int], arguments: Sequence[str]) -> int:
    """Calls `task` with the settings in `arguments`. Returns its exit code, or that of its error.

    With `--help`, prints `doc`, the command's docstring, and the settings instead.
    """
    if _HELP & set(arguments):
        print(f"{usage(name, settings)}\n\n{inspect.cleandoc(doc)}\n\nSettings:\n\n{settings_help(settings)}")
        return EXIT_OK
    try:
        return task(parse(settings, arguments))
    except PipelineError as error:
        if isinstance(error, UsageError):
            print(usage(name, settings), file=sys.stderr)
        print(error, file=sys.stderr)
        return error.exit_code
