"""Is a store sound? `python -m pipeline.verify store.path=...` reads and checks every committed block.

Exit codes: 0 sound; 1 something is wrong, and listed, or the store cannot be reached; 2 there is no store; 42
interrupted.
"""

from pipeline.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from collections.abc import Callable

from tqdm import tqdm

from pipeline.errors import EXIT_FAILED, EXIT_OK, ConfigError, StoreError
from pipeline.store.problems import Problem
from pipeline.store.verify import verify_store


def main(arguments: list[str]) -> int:
    """Verifies the store that `arguments` name, prints what is wrong, and returns the exit code."""
    try:
        return verify_and_print(store_path(arguments))
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        return error.exit_code


def verify_and_print(path: str) -> int:
    """Verifies a store with a progress bar, prints what is wrong, and returns the exit code. Raises StoreError."""
    notes: list[str] = []
    problems = verify_with_progress(path, notes.append)
    for note in notes:
        print(f"note: {note}")
    if not problems:
        print(f"{path}: sound")
        return EXIT_OK
    for problem in problems:
        print(problem)
    remedies = dict.fromkeys(problem.remedy for problem in problems)
    print(f"{path}: {len(problems)} problems. {' '.join(remedies)}")
    return EXIT_FAILED


def store_path(arguments: list[str]) -> str:
    """The value of `store.path=...`, the only argument. Raises ConfigError."""
    key, _, path = arguments[0].partition("=") if len(arguments) == 1 else ("", "", "")
    if key != "store.path" or not path:
        raise ConfigError("usage: python -m pipeline.verify store.path=...")
    return path.strip("'\"")


def verify_with_progress(path: str, note: Callable[[str], None]) -> list[Problem]:
    """`verify_store` with a progress bar on stderr, in blocks."""
    with tqdm(unit="block", desc="verify", file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return verify_store(path, progress, note)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
