"""Verifies a store with a progress bar, prints the problems and, if asked to, removes what is damaged."""

from pipeline.core.counts import counted
from pipeline.core.errors import EXIT_FAILED, EXIT_OK
from pipeline.core.progress import progress_bar
from pipeline.store.check.repairing import Quiet, repair
from pipeline.store.check.scope import EVERYTHING, Scope
from pipeline.store.check.verifying import examine
from pipeline.store.format.metadata import require_root
from pipeline.store.io.storage import Storage


def verify_and_print(path: str, scope: Scope = EVERYTHING, repairs: bool = False) -> int:
    """Verifies a store with a progress bar, prints notes and problems, and returns the exit code. Raises StoreError.

    repairs: remove what is damaged, and objects that belong to no committed block.
    """
    storage = Storage.open(path)
    quiet = Quiet(storage) if repairs else None
    notes: list[str] = []
    with progress_bar("verify", "block") as progress:
        findings = examine(storage, progress, notes.append, scope, find_leftovers=repairs)
    for line in (*(f"note: {note}" for note in notes), *findings.problems):
        print(line)
    remedies = dict.fromkeys(problem.remedy for problem in findings.problems)
    if not remedies:
        print(f"{path}: {'sound' if scope.is_everything else 'no problem found'}")
    else:
        print(f"{path}: {counted(len(findings.problems), 'problem')}.")
    for remedy in remedies:
        if not (repairs and remedy.is_repair):
            print(f"verify.repair=true {remedy}" if remedy.is_repair else remedy)
    doomed = [problem for problem in (*findings.problems, *findings.leftovers) if problem.remedy.is_repair]
    if quiet is not None and doomed:
        quiet.require(require_root(storage))
        num_records, num_objects = repair(storage, doomed)
        removed = f"{counted(num_records, 'commit record')} and {counted(num_objects, 'other object')}"
        print(f"{path}: removed {removed}. Run the job's command again: it completes the store.")
    is_done = all(repairs and remedy.is_repair for remedy in remedies)
    return EXIT_OK if is_done else EXIT_FAILED
