"""The keys of groups of generated documents in a store."""

from pipeline.store.format.keys import stream_prefix

GENERATED_PREFIX = "_generated/"


def group_key(stream: int, index: int) -> str:
    """The key of a group, relative to the store."""
    return f"{stream_prefix(GENERATED_PREFIX, stream)}group-{index:06d}.parquet"
