"""The target: how many tokens a store is to hold, and each stream's share of them. A store's target only grows."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipeline.store.format.block_table import BlockTable

ALL = "all"  # run.max_tokens=null: every token of the data

Target = int | Literal["all"]


def target_of(config: Mapping[str, Any]) -> Target:
    """The target in a run's resolved configuration."""
    max_tokens = config["run"]["max_tokens"]
    return ALL if max_tokens is None else max_tokens


def larger(first: Target, second: Target) -> Target:
    """The larger of two targets."""
    return ALL if ALL in (first, second) else max(first, second)


def stream_share(target: Target, num_streams: int, stream: int) -> int | None:
    """How many valid tokens one stream contributes to the target; None for all that it has."""
    if target == ALL:
        return None
    share, remainder = divmod(target, num_streams)
    return share + (stream < remainder)


def has_share(blocks: BlockTable, share: int | None) -> bool:
    """Whether a stream with the committed `blocks` has its share of tokens, or all tokens of its data."""
    if len(blocks) and blocks[-1].exhausted:
        return True
    return share is not None and blocks.total("tokens") >= share


def is_reached(streams: Sequence[BlockTable], target: Target) -> bool:
    """Whether each of the `streams` has its share of the target."""
    shares = (stream_share(target, len(streams), stream) for stream in range(len(streams)))
    return all(map(has_share, streams, shares))
