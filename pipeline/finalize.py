"""Marks a store complete: `python -m pipeline.finalize store.path=...`, once all of its workers are done.

A run does this by itself when it finds every stream at its end; workers that do not know of each other may each have
ended before the others. May be repeated, also at the same time. `force=true` completes a store whose streams have not
ended or are claimed, with what it holds.

Exit codes: 0 complete; 1 a stream has not ended or is claimed, and is named, or the store cannot be reached; 2 there is
no store, or it is damaged; 42 interrupted.
"""

from pipeline.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from collections.abc import Sequence

from pipeline.errors import EXIT_FAILED, EXIT_OK, ConfigError, StoreError
from pipeline.store.claims import held_claims
from pipeline.store.commits import CommitRecord
from pipeline.store.target import has_share, stream_share, target_of
from pipeline.store.writing import StoreWriter

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


def finalize(store: StoreWriter, is_forced: bool = False) -> str | None:
    """Prints what each stream holds and marks the store complete; or says why not. Raises StoreError."""
    unfinished = [stream for stream in range(store.metadata.num_streams) if not print_stream(store, stream)]
    if unfinished and not (is_forced or store.complete):
        return (
            f"streams {', '.join(map(str, unfinished))} have not ended. Let the workers go on, start one more, or run "
            f"pipeline.finalize with force=true to complete the store with what it holds."
        )
    holders = held_claims(store.path)
    if holders and not is_forced:
        held = ", ".join(f"{stream} by {owner}" for stream, owner in holders.items())
        return (
            f"workers hold streams ({held}). Let them end, or run pipeline.finalize with force=true if they are dead."
        )
    if not store.finish(is_forced):
        return (
            "another run began to extend it, or it has lost commit records. Let that run go on, look at "
            "pipeline.verify, or run pipeline.finalize with force=true."
        )
    return None


def parse(arguments: list[str]) -> tuple[str, bool]:
    """The values of `store.path` and `force`. Raises ConfigError."""
    values = dict(argument.partition("=")[::2] for argument in arguments)
    path, force = values.pop("store.path", ""), values.pop("force", "false")
    if not path or values or force not in ("true", "false"):
        raise ConfigError(_USAGE)
    return path.strip("'\""), force == "true"


def print_stream(store: StoreWriter, stream: int) -> bool:
    """Prints what a stream holds; returns whether it is at its end."""
    records = store.records.get(stream, [])
    target = store.target
    if target is None:  # an earlier program's store: what the run that created it wanted, and perhaps a longer one did
        share = stream_share(target_of(store.metadata.config), store.metadata.num_streams, stream)
        end = _end_of_old_stream(records, share, store.layout.length)
    else:
        end = end_of(records, stream_share(target, store.metadata.num_streams, stream))
    tokens = sum(record.tokens for record in records)
    print(f"stream {stream}: {len(records)} blocks, {tokens:,} tokens, {end or 'NOT AT ITS END'}")
    return end is not None


def end_of(records: Sequence[CommitRecord], share: int | None) -> str | None:
    """Why a stream ends where it does, or None if it does not hold its share of the store's target."""
    if not has_share(records, share):
        return None
    return "the end of its data" if records and records[-1].exhausted else "the end of its share of run.max_tokens"


def _end_of_old_stream(records: Sequence[CommitRecord], share: int | None, length: int) -> str | None:
    """Without a truncated block a share is reached by the last row, of at most `length` tokens, of the last block."""
    if records and records[-1].exhausted:
        return "the end of its data"
    reached = share is not None and 0 <= sum(record.tokens for record in records) - share < length
    return "the end of its share of run.max_tokens" if reached or (records and records[-1].truncated) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
