"""Marks a store complete, for the command `pipeline.finalize`."""

from pipeline.core.messages import counted
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.target import has_share, stream_share
from pipeline.store.write.store_writer import StoreWriter


def finalize(store: StoreWriter, is_forced: bool = False) -> str | None:
    """Prints what each stream holds and marks the store complete. Returns None, or why it cannot. Raises StoreError."""
    streams = store.streams.all()
    unfinished = [stream for stream in streams if not _print_stream(store, stream, streams[stream].table)]
    if unfinished and not (is_forced or store.complete):
        return (
            f"streams {', '.join(map(str, unfinished))} are unfinished. Let the jobs continue, start another, or "
            f"run pipeline.finalize with force=true to complete the store as it is."
        )
    if not store.finish(is_forced):
        return (
            "another run began to extend it, or it has lost commit records. Let that run continue, run "
            "pipeline.verify, or run pipeline.finalize with force=true."
        )
    return None


def _print_stream(store: StoreWriter, stream: int, blocks: BlockTable) -> bool:
    """Prints what a stream holds, and why it ends there; returns whether it is at its end."""
    is_whole = has_share(blocks, stream_share(store.target, store.metadata.num_streams, stream))
    end = "the end of its data" if len(blocks) and blocks[-1].exhausted else "the end of its share of run.max_tokens"
    state = end if is_whole else "UNFINISHED"
    print(f"stream {stream}: {counted(len(blocks), 'block')}, {blocks.total('tokens'):,} tokens, {state}")
    return is_whole
