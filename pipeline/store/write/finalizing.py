"""Marking a store complete that several workers have filled."""

from collections.abc import Sequence

from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.target import has_share, stream_share, target_of
from pipeline.store.write.claims import held_claims, named_holders
from pipeline.store.write.store_writer import StoreWriter


def finalize(store: StoreWriter, is_forced: bool = False) -> str | None:
    """Prints what each stream holds and marks the store complete; or says why not. Raises StoreError."""
    unfinished = [stream for stream in range(store.metadata.num_streams) if not print_stream(store, stream)]
    if unfinished and not (is_forced or store.complete):
        return (
            f"streams {', '.join(map(str, unfinished))} have not ended. Let the workers go on, start one more, or run "
            f"pipeline.finalize with force=true to complete the store with what it holds."
        )
    holders = held_claims(store.storage)
    if holders and not is_forced:
        held = named_holders(holders)
        return (
            f"workers hold streams ({held}). Let them end, or run pipeline.finalize with force=true if they are dead."
        )
    if not store.finish(is_forced):
        return (
            "another run began to extend it, or it has lost commit records. Let that run go on, look at "
            "pipeline.verify, or run pipeline.finalize with force=true."
        )
    return None


def print_stream(store: StoreWriter, stream: int) -> bool:
    """Prints what a stream holds; returns whether it is at its end."""
    records = store.records.get(stream, [])
    target = store.target
    if target is None:  # an earlier program's store has none: take what the run that created it wanted
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
