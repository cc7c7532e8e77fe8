"""Verifies a store with a progress bar, and prints the problems."""

from collections.abc import Callable

from pipeline.core.errors import EXIT_FAILED, EXIT_OK
from pipeline.core.progress import progress_bar
from pipeline.store.check.scope import EVERYTHING, Scope
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.problems import Problem


def verify_and_print(path: str, scope: Scope = EVERYTHING) -> int:
    """Verifies a store with a progress bar, prints notes and problems, and returns the exit code. Raises StoreError."""
    notes: list[str] = []
    problems = verify_with_progress(path, notes.append, scope)
    for note in notes:
        print(f"note: {note}")
    if not problems:
        print(f"{path}: {'sound' if scope.is_everything else 'no problem found'}")
        return EXIT_OK
    for problem in problems:
        print(problem)
    remedies = dict.fromkeys(problem.remedy for problem in problems)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"{path}: {count}. {' '.join(remedies)}")
    return EXIT_FAILED


def verify_with_progress(path: str, note: Callable[[str], None], scope: Scope = EVERYTHING) -> list[Problem]:
    """`verify_store` with a progress bar on stderr that counts blocks."""
    with progress_bar("verify", "block") as progress:
        return verify_store(path, progress, note, scope)
