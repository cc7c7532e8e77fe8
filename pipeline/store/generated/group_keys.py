"""The keys of groups of generated documents in a store."""

GENERATED_PREFIX = "_generated/"


def stream_prefix(stream: int) -> str:
    """The prefix of the keys of a stream's groups."""
    return f"{GENERATED_PREFIX}stream-{stream:05d}/"


def group_key(stream: int, index: int) -> str:
    """The key of a group, relative to the store."""
    return f"{stream_prefix(stream)}group-{index:06d}.parquet"
