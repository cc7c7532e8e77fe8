"""Merges stores with the same configuration into one: `python -m pipeline.merge from=... from=... store.path=...`.

For workers that cannot write to one store: each runs with its share of the streams (`run.worker_index`) and its own
`store.path`. Blocks are copied unchanged. The merged store is marked as complete if every stream is finished, and then
verified. The sources are not changed. Repeat an interrupted merge to continue it.

Exit codes: 0 merged and sound, complete or not; 1 a problem was found, or a store cannot be reached; 2 the stores
cannot be merged, or one of them does not exist or has lost objects; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass

from pipeline.cli.settings import setting
from pipeline.cli.store_command import run_command
from pipeline.core.errors import EXIT_OK
from pipeline.core.progress import progress_bar
from pipeline.store.check.reporting import verify_and_print
from pipeline.store.write.finalizing import finalize
from pipeline.store.write.merging import merge_stores


@dataclass(frozen=True)
class Settings:
    sources: tuple[str, ...] = setting("from", "a store to copy from; repeat for each store", is_repeated=True)
    path: str = setting("store.path", "the merged store: new, one of the sources, or left by an interrupted merge")


def merge(settings: Settings) -> int:
    """Merges with a progress bar, and verifies the result. Returns the exit code."""
    with progress_bar("merge", "block") as progress:
        store = merge_stores(settings.sources, settings.path, progress)
    obstacle = finalize(store)
    code = verify_and_print(settings.path)
    if code == EXIT_OK:
        print(f"{settings.path}: {'complete' if obstacle is None else f'not complete: {obstacle}'}")
    return code


def main(arguments: list[str]) -> int:
    return run_command("merge", __doc__, Settings, merge, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
