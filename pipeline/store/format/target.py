"""The target: how many tokens a store is to hold, which only grows, and the share of it that each stream has."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipeline.store.format.block_table import BlockTable

ALL = "all"  # run.max_tokens=null: every token of the data

Target = int | Literal["all"]


def target_of(config: Mapping[str, Any]) -> Target | None:
    """The target of the run whose resolved configuration this is; None where it does not say."""
    run = config.get("run")
    if not isinstance(run, Mapping) or "max_tokens" not in run:
        return None
    return ALL if run["max_tokens"] is None else run["max_tokens"]


def larger(first: Target | None, second: Target | None) -> Target | None:
    """The larger of two targets. None, an unknown one, is the smallest."""
    if ALL in (first, second):
        return ALL
    return max((target for target in (first, second) if target is not None), default=None)


def stream_share(target: Target | None, num_streams: int, stream: int) -> int | None:
    """The valid tokens that fall to one stream; None for all that it has."""
    if target is None or target == ALL:
        return None
    share, rest = divmod(target, num_streams)
    return share + (stream < rest)


def has_share(blocks: BlockTable, share: int | None) -> bool:
    """Whether a stream, whose committed blocks are `blocks`, holds its share, or all that its data has."""
    if len(blocks) and blocks[-1].exhausted:
        return True
    return share is not None and blocks.total("tokens") >= share


def is_reached(streams: Sequence[BlockTable], target: Target | None) -> bool:
    """Whether each of the `streams` holds its share of the target. Nothing is known to be missing of an unknown
    target."""
    if target is None:
        return True
    shares = (stream_share(target, len(streams), stream) for stream in range(len(streams)))
    return all(map(has_share, streams, shares))
