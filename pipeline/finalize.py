"""Marks a store complete: `python -m pipeline.finalize store.path=...`, once all of its workers are done.

A run does this by itself when it finds every stream at its end; workers that do not know of each other may each have
ended before the others. May be repeated, also at the same time. `force=true` completes a store whose streams have not
ended or are claimed, with what it holds.

Exit codes: 0 complete; 1 a stream has not ended or is claimed, and is named, or the store cannot be reached; 2 there is
no store, or it is damaged; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys

from pipeline.core.errors import EXIT_FAILED, EXIT_OK, ConfigError, StoreError
from pipeline.store.write.finalizing import finalize
from pipeline.store.write.store_writer import StoreWriter

_USAGE = "usage: python -m pipeline.finalize store.path=... [force=true]"


def main(arguments: list[str]) -> int:
    """Finalizes the store that `arguments` name, prints what each stream holds, and returns the exit code."""
    try:
        path, is_forced = parse(arguments)
        obstacle = finalize(StoreWriter.open_existing(path), is_forced)
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if obstacle is not None:
        print(f"{path} is not completed: {obstacle}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{path}: complete")
    return EXIT_OK


def parse(arguments: list[str]) -> tuple[str, bool]:
    """The values of `store.path` and `force`. Raises ConfigError."""
    values = dict(argument.partition("=")[::2] for argument in arguments)
    path, force = values.pop("store.path", ""), values.pop("force", "false")
    if not path or values or force not in ("true", "false"):
        raise ConfigError(_USAGE)
    return path.strip("'\""), force == "true"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
