"""Checks a store: `python -m pipeline.verify store.path=...` reads every committed block.

To share the work on a large store among W processes, give each `verify.world=W` and its own `verify.rank`, from 0 to
W - 1. Each process checks every W-th stream; the store is sound if none of them finds a problem. `verify.sample=0.01`
reads the objects of one block in 100, the same ones for the same `verify.seed`: its document table, statistics and
arrays must be what its record says, and outputs in their range. Of the other blocks, all of them
with `verify.sample=0`, the records are read, and the objects must exist. A complete store must have no others.

`verify.repair=true` removes what is damaged, and objects that belong to no committed block: first the summary is taken
out of the root, then the commit records of damaged blocks and of all later blocks of their streams are deleted, then
the damaged objects. The job's command then completes the store. It removes nothing while a job renews its leases; stop
jobs with run.exclusive=true yourself.

Exit codes: 0 the store is sound, or all damage was removed; 1 problems were found (they are listed, with what
`verify.repair=true` would do), or the store cannot be reached; 2 there is no store, or its root is damaged; 42
interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass

from pipeline.cli.settings import command, flag, fraction, read_store_path, setting, whole_number
from pipeline.core.errors import ConfigError
from pipeline.store.check.problems import Scope
from pipeline.store.check.repairing import verify_and_print


@dataclass(frozen=True)
class Settings:
    path: str = read_store_path()
    rank: int = setting("verify.rank", "which share of the streams to check, from 0", whole_number(0), default=0)
    world: int = setting("verify.world", "the number of shares", whole_number(1), default=1)
    sample: float = setting("verify.sample", "fraction of the blocks to read", fraction, default=1.0)
    seed: int = setting("verify.seed", "selects the sample", whole_number(0), default=0)
    repair: bool = setting("verify.repair", "whether to remove what is damaged", flag, default=False)


def verify(settings: Settings) -> int:
    """Prints the store's problems, and repairs it if asked to. Returns the exit code."""
    if settings.rank >= settings.world:
        raise ConfigError(
            f"verify.rank={settings.rank}: expected a number below verify.world={settings.world}. Ranks count from 0."
        )
    scope = Scope(settings.rank, settings.world, settings.sample, settings.seed)
    return verify_and_print(settings.path, scope, settings.repair)


main = command("verify", __doc__, Settings, verify)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
