"""Deletes a store: `python -m pipeline.delete store.path=... confirm=true`, local or remote.

Without `confirm=true` it only says what the store holds. Objects are deleted by the exact names that a store's have:
others beside them stay, and symbolic links, which are not followed either; they are named. The root goes last, so a
deletion that was interrupted can be repeated. `force=true` deletes a store whose streams are claimed, by workers that
were killed.

Exit codes: 0 deleted; 1 the store is claimed by workers or cannot be reached; 2 not confirmed, or there is no store; 42
interrupted, delete again.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from itertools import islice

from pipeline.core.errors import EXIT_OK, ConfigError, StoreError
from pipeline.store.format.metadata import require_root
from pipeline.store.io.kvstore import open_kvstore
from pipeline.store.write.claims import held_claims
from pipeline.store.write.deleting import delete_store

_USAGE = "usage: python -m pipeline.delete store.path=... [confirm=true] [force=true]"
_MAX_NAMED = 5  # of what is left
_SETTINGS = {"store.path": "", "confirm": "false", "force": "false"}


def main(arguments: list[str]) -> int:
    """Deletes the store that `arguments` name and returns the exit code."""
    try:
        path, is_confirmed, is_forced = parse(arguments)
        root = require_root(path, open_kvstore(path))
        if not is_confirmed:
            what = "complete" if root.complete else "unfinished"
            arrays = ", ".join(root.arrays)
            raise ConfigError(f"{path}: a {what} store of {arrays}, created {root.created}. confirm=true deletes it.")
        holders = {} if is_forced else held_claims(path)
        if holders:
            held = ", ".join(f"{stream} by {owner}" for stream, owner in holders.items())
            raise StoreError(
                f"{path} is not deleted: workers hold streams ({held}). Let them end first, or add force=true if they "
                "are dead."
            )
        left = list(islice(delete_store(path, root), _MAX_NAMED + 1))
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    names = ", ".join(left[:_MAX_NAMED]) + (", ..." if len(left) > _MAX_NAMED else "")
    print(f"{path}: deleted" + (f", but for what is not the store's: {names}" if left else ""))
    return EXIT_OK


def parse(arguments: list[str]) -> tuple[str, bool, bool]:
    """The values of `store.path`, `confirm` and `force`. Raises ConfigError."""
    values = dict(argument.partition("=")[::2] for argument in arguments)
    path, *answers = (values.pop(key, default) for key, default in _SETTINGS.items())
    if not path or values or not {"true", "false"} >= set(answers):
        raise ConfigError(_USAGE)
    confirm, force = (answer == "true" for answer in answers)
    return path.strip("'\""), confirm, force


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
