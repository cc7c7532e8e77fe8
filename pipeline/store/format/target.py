"""The target: how many tokens a store is to hold, and each stream's share of them. A store's target only grows."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipeline.store.format.block_table import BlockTable

ALL = "all"  # run.max_tokens=null: every token of the data

Target = int | Literal["all"]


def target_of(config: Mapping[str, Any]) -> Target | None:
    """The target in a run's resolved configuration; None where `run.max_tokens` is absent."""
    run = config.get("run")
    if not isinstance(run, Mapping) or "max_tokens" not in run:
        return None
    return ALL if run["max_tokens"] is None else run["max_tokens"]


def larger(first: Target | None, second: Target | None) -> Target | None:
    """The larger of two targets. None (an unknown target) is the smallest."""
    if ALL in (first, second):
        return ALL
    return max((target for target in (first, second) if target is not None), default=None)


def stream_share(target: Target | None, num_streams: int, stream: int) -> int | None:
    """How many valid tokens one stream contributes to the target; None for all that it has."""
    if target is None or target == ALL:
        return None
    share, remainder = divmod(target, num_streams)
    return share + (stream < remainder)


def has_share(blocks: BlockTable, share: int | None) -> bool:
    """Whether a stream with the committed `blocks` has its share of tokens, or all tokens of its data."""
    if len(blocks) and blocks[-1].exhausted:
        return True
    return share is not None and blocks.total("tokens") >= share


def is_reached(streams: Sequence[BlockTable], target: Target | None) -> bool:
    """Whether each of the `streams` has its share of the target. An unknown target (None) counts as reached."""
    if target is None:
        return True
    shares = (stream_share(target, len(streams), stream) for stream in range(len(streams)))
    return all(map(has_share, streams, shares))
