"""Checks a store: `python -m pipeline.verify store.path=...` reads every committed block.

Exit codes: 0 the store is sound; 1 problems were found, which are listed, or the store cannot be reached; 2 there is no
store; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass

from pipeline.cli.settings import store_path
from pipeline.cli.store_command import run_command
from pipeline.store.check.reporting import verify_and_print


@dataclass(frozen=True)
class Settings:
    path: str = store_path()


def verify(settings: Settings) -> int:
    """Prints the store's problems. Returns the exit code."""
    return verify_and_print(settings.path)


def main(arguments: list[str]) -> int:
    return run_command("verify", __doc__, Settings, verify, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
