"""Verifies a store with a progress bar, and prints the problems."""

from collections.abc import Callable

from pipeline.core.counts import counted
from pipeline.core.errors import EXIT_FAILED, EXIT_OK, StoreInvalid
from pipeline.core.progress import progress_bar
from pipeline.store.check.repairing import repair_steps
from pipeline.store.check.scope import EVERYTHING, Scope
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.metadata import require_root
from pipeline.store.format.problems import Problem
from pipeline.store.io.storage import Storage


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
    count = counted(len(problems), "problem")
    print(f"{path}: {count}.")
    storage = Storage.open(path)
    for step in repair_steps(storage, _num_streams(storage), problems):
        print(step)
    return EXIT_FAILED


def _num_streams(storage: Storage) -> int | None:
    """The number of streams in the root; None if it cannot be read."""
    try:
        return require_root(storage).metadata.num_streams
    except StoreInvalid:
        return None


def verify_with_progress(path: str, note: Callable[[str], None], scope: Scope = EVERYTHING) -> list[Problem]:
    """`verify_store` with a progress bar on stderr that counts blocks."""
    with progress_bar("verify", "block") as progress:
        return verify_store(path, progress, note, scope)
