"""Marks a store as complete: `python -m pipeline.finalize store.path=...`, once its jobs have ended.

A run does this itself when every stream is finished. The command can be repeated, and can run several times at once.

Exit codes: 0 complete; 1 a stream is unfinished (the message names it), or the store cannot be reached; 2 there
is no store, or it is damaged; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass

from pipeline.cli.settings import flag, setting, store_path
from pipeline.cli.store_command import run_command
from pipeline.core.errors import EXIT_OK, StoreError
from pipeline.store.write.finalizing import finalize
from pipeline.store.write.store_writer import StoreWriter


@dataclass(frozen=True)
class Settings:
    path: str = store_path()
    force: bool = setting("force", "complete it even if streams are unfinished", flag, default=False)


def finalize_store(settings: Settings) -> int:
    """Prints what each stream holds, and completes the store. Returns the exit code. Raises StoreError if it cannot."""
    obstacle = finalize(StoreWriter.open_existing(settings.path), settings.force)
    if obstacle is not None:
        raise StoreError(f"cannot complete {settings.path}: {obstacle}")
    print(f"{settings.path}: complete")
    return EXIT_OK


def main(arguments: list[str]) -> int:
    return run_command("finalize", __doc__, Settings, finalize_store, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
