"""Is a store sound? `python -m pipeline.verify store.path=...` reads and checks every committed block.

Exit codes: 0 sound; 1 something is wrong, and listed, or the store cannot be reached; 2 there is no store; 42
interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys

from pipeline.core.errors import ConfigError, StoreError
from pipeline.store.check.reporting import verify_and_print


def main(arguments: list[str]) -> int:
    """Verifies the store that `arguments` name, prints what is wrong, and returns the exit code."""
    try:
        return verify_and_print(store_path(arguments))
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        return error.exit_code


def store_path(arguments: list[str]) -> str:
    """The value of `store.path=...`, the only argument. Raises ConfigError."""
    key, _, path = arguments[0].partition("=") if len(arguments) == 1 else ("", "", "")
    if key != "store.path" or not path:
        raise ConfigError("usage: python -m pipeline.verify store.path=...")
    return path.strip("'\"")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
